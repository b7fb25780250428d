"""The cluster's cores under seeded faults: answers are right or an error, and in time.

`make test` runs the same 500 seeds every time, `make test-slow` as many further ones as TWINPOOL_SEEDS says. A seed
takes about 45 ms of one core. The faults of a seed are drawn by `Faults.random`: messages that are lost, repeated, late
or out of order, payloads damaged or cut short, slow links, partitions in one direction or both; every role crashes or
is paused for a while, the router too, and workers hang while their heartbeats go on.
"""

import os

import pytest
from simulated_cluster import Cluster
from simulated_network import Faults
from simulated_workers import LEASE_S
from twinpool.router.generation import Finished, GenerationFailed

SEEDS_A_TEST = 50
NUM_SEEDS = 500
NUM_PARTS = 20
SLOW_SEEDS = int(os.environ.get("TWINPOOL_SEEDS", "1000"))


def run_seeds(first: int, number: int) -> None:
    for seed in range(first, first + number):
        try:
            Cluster(seed).run()
        except Exception as error:
            replay = f"from simulated_cluster import Cluster; Cluster({seed}).run()"
            error.add_note(f'replay with: PYTHONPATH=tests/support .venv/bin/python -c "{replay}"')
            raise


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_A_TEST))
def test_invariants_hold_under_faults(first: int) -> None:
    """I1, I2, I3, I4 and I6 hold after every event, for every seed; everything comes home at the end."""
    run_seeds(first, SEEDS_A_TEST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_invariants_hold_for_many_more_seeds(part: int) -> None:
    """The same, for as many further seeds as TWINPOOL_SEEDS says, in parts for several processes."""
    first, end = (NUM_SEEDS + SLOW_SEEDS * edge // NUM_PARTS for edge in (part, part + 1))
    run_seeds(first, end - first)


def test_without_faults_every_request_finishes_at_the_first_attempt() -> None:
    """A quiet network is the control: no failure, no retry, no dropped frame."""
    cluster = Cluster(1, Faults())
    cluster.run()
    events = [client.terminal for client in cluster.clients.values() if not client.is_gone]
    assert events
    assert all(isinstance(event, Finished) and event.timeline.num_attempts == 1 for event in events)
    assert sum(worker.core.receiver.num_dropped_frames for worker in cluster.completions) == 0


def test_the_simulation_reaches_what_it_is_meant_to_test() -> None:
    """Over some seeds: attempts are lost and repeated, sequences preempted, frames dropped, time runs out.

    Workers are lost in each way there is: silent, busy without progress, replaced by their next life, stopped in order.
    """
    clusters = [Cluster(seed) for seed in range(60)]
    for cluster in clusters:
        cluster.run()
    timelines = [
        c.terminal.timeline for cl in clusters for c in cl.clients.values() if isinstance(c.terminal, Finished)
    ]
    assert sum(timeline.num_attempts > 1 for timeline in timelines) >= 10
    assert sum(timeline.num_preemptions > 0 for timeline in timelines) >= 5
    assert sum(worker.core.receiver.num_dropped_frames for cl in clusters for worker in cl.completions) >= 10
    failures = [c.terminal for cl in clusters for c in cl.clients.values() if isinstance(c.terminal, GenerationFailed)]
    assert sum(failure.code == "timeout" for failure in failures) >= 100
    routers = [router for cluster in clusters for router in cluster.routers]
    lost = " | ".join(incident.what for router in routers for incident in router.core.incidents)
    for reason in ("no heartbeat", "without progress", "replaced by a new process", "gone: stopped"):
        assert lost.count(reason) >= 3, reason
    assert all(timeline.return_s >= 0 for timeline in timelines), "I5: the stages exceed the TTFT"


def test_a_seed_replays_exactly() -> None:
    """The same seed gives the same run, event for event."""

    def outcome(seed: int) -> list[tuple[str, list[int], object]]:
        cluster = Cluster(seed)
        cluster.run()
        return [(key, client.tokens, client.terminal) for key, client in cluster.clients.items()]

    assert outcome(7) == outcome(7)


def test_a_request_that_ends_at_its_first_token_is_no_failure() -> None:
    """Regression: the receiver took the sender's Cancelled for a failure when it overtook the router's FirstToken."""
    for seed in range(10):
        cluster = Cluster(seed, Faults(max_delay_s=0.2), num_requests=24)
        cluster.run()
        ended = [c.terminal for c in cluster.clients.values() if c.request.sampling.max_tokens == 1 and not c.is_gone]
        assert all(isinstance(event, Finished) and event.timeline.num_attempts == 1 for event in ended)


def test_without_faults_no_cancelled_transfer_waits_for_its_lease() -> None:
    """Blocks come home at the sender's word; their lease is for senders that are gone, not the usual way."""
    num_cancelled = 0
    for seed in range(20):
        cluster = Cluster(seed, Faults(), num_requests=40)
        since_s: dict[tuple[str, tuple[str, int]], float] = {}

        def watch(cluster: Cluster = cluster, since_s: dict[tuple[str, tuple[str, int]], float] = since_s) -> None:
            for worker in cluster.completions:
                keys = worker.core.receiver.keys()
                for key in (key for key in keys if not worker.core.receiver.is_open(key)):
                    waited_s = cluster.sim.now - since_s.setdefault((worker.name, key), cluster.sim.now)
                    assert waited_s < LEASE_S / 5, f"{key} waits for its lease"

        cluster.sim.run(cluster.sim.healed_s + 70.0, watch)
        num_cancelled += len(since_s)
    assert num_cancelled >= 10, "too few for this to say much"


def test_attempts_go_on_from_the_kv_of_lost_ones() -> None:
    """Many crashes on a slow network: some attempts resume what a dead PROMPT worker had sent; all invariants hold."""
    clusters = [Cluster(seed, Faults(max_delay_s=0.3, num_crashes=20), num_requests=60) for seed in (2, 3, 6, 7)]
    for cluster in clusters:
        cluster.run()
    assert sum(cluster.num_resumed for cluster in clusters) >= 3
