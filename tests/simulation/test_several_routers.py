"""Several routers serve one set of workers: what happens to one of them touches only what it had asked for."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from simulated_cluster import Client, Cluster
from simulated_network import Faults
from simulated_router import SimulatedRouter
from simulated_workers import BLOCK_SIZE
from twinpool.router.generation import Finished

SEEDS_A_TEST = 20
NUM_SEEDS = 40
NUM_SLOW_SEEDS = 1000


def run_seeds(first: int, number: int) -> None:
    for seed in range(first, first + number):
        rng = random.Random(seed)
        faults = replace(Faults.random(rng), num_router_crashes=rng.choice([0, 1, 3]))
        try:
            Cluster(seed, faults, num_probes=rng.choice([0, 8]), num_routers=rng.choice([2, 2, 3])).run()
        except Exception as error:
            error.add_note(f"replay with run_seeds({seed}, 1)")
            raise


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_A_TEST))
def test_invariants_hold_with_several_routers_under_faults(first: int) -> None:
    """As with one: answers are right, in time, and end once; blocks come home; every router has its workers again."""
    run_seeds(first, SEEDS_A_TEST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_invariants_hold_with_several_routers_for_many_more_seeds(part: int) -> None:
    size = NUM_SLOW_SEEDS // 4
    run_seeds(NUM_SEEDS + part * size, size)


def clients_of(cluster: Cluster, router: SimulatedRouter) -> list[Client]:
    return [client for client in cluster.clients.values() if client.router is router and not client.is_gone]


def names_at_second(cluster: Cluster) -> list[str]:
    return [str(worker.links[1].worker) for worker in cluster.workers]


def run_with(seed: int, fault: Callable[[Cluster], None]) -> Cluster:
    """Two routers, nothing goes wrong but `fault`; every worker keeps the name that it has at the second router."""
    cluster = Cluster(seed, Faults(max_delay_s=0.2), num_requests=40, num_routers=2)
    names: list[list[str]] = []
    cluster.sim.at(0.9, lambda: names.append(names_at_second(cluster)))
    fault(cluster)
    cluster.run()
    assert names == [names_at_second(cluster)]
    assert all(incident.what.startswith("joined") for incident in cluster.routers[1].core.incidents)
    return cluster


def check_undisturbed(cluster: Cluster) -> None:
    """Every request of the second router that a worker can hold was answered at the first attempt."""
    room = cluster.num_completion_blocks * BLOCK_SIZE
    clients = clients_of(cluster, cluster.routers[1])
    survivors = [c for c in clients if len(c.request.token_ids) + c.request.sampling.max_tokens <= room]
    assert len(survivors) >= 10
    for client in survivors:
        assert isinstance(client.terminal, Finished)
        assert client.terminal.timeline.num_attempts == 1, f"{client.request.request_id} lost an attempt"


@pytest.mark.parametrize("seed", range(6))
def test_the_deaths_of_a_router_cost_another_ones_requests_nothing(seed: int) -> None:
    num_lost = 0

    def die(cluster: Cluster) -> None:
        nonlocal num_lost
        num_lost += sum(client.terminal is None for client in clients_of(cluster, cluster.routers[0]))
        cluster.crash(cluster.routers[0])

    def fault(cluster: Cluster) -> None:
        for at_s in (1.05, 4.0, 7.0, 11.0):
            cluster.sim.at(at_s, lambda: die(cluster))

    check_undisturbed(run_with(seed, fault))
    assert num_lost >= 1, "nothing ran that could have been lost"


@pytest.mark.parametrize("seed", range(6))
def test_a_router_without_its_workers_costs_another_ones_requests_nothing(seed: int) -> None:
    """Cut off from one COMPLETION worker it says PeerGone; from all of them, it gives up everything."""

    def fault(cluster: Cluster) -> None:
        lost = cluster.completions[:1] if seed % 2 else cluster.workers
        for at_s in (1.05, 9.0):
            for worker in lost:
                for ends in (("router", worker.name), (worker.name, "router")):
                    cluster.sim.at(at_s, lambda ends=ends: cluster.sim.cut(*ends, 6.0))

    cluster = run_with(seed, fault)
    check_undisturbed(cluster)
    assert any(incident.what.startswith("gone") for incident in cluster.routers[0].core.incidents)
