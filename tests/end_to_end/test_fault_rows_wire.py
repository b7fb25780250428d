"""Links that lose, double, swap, delay and damage messages: no answer is wrong, no block is lost (rows R10 and R11)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from frame_proxy import Faults
from invariants import Answer, Asker, Invariants
from proxied_cluster import ProxiedCluster, is_kv
from reports import report

FAKE = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 256, "fake_seconds_per_row": 0.0005}}
SPEC = {"prompt": FAKE, "completion": FAKE}
ROUGH = Faults(drop=0.01, duplicate=0.05, reorder=0.05, delay_s=(0.0, 0.2))


@pytest.fixture
def cluster(tiny_llama: Path) -> Iterator[ProxiedCluster]:
    with ProxiedCluster(tiny_llama, SPEC, seed=12) as cluster:
        yield cluster


def num_dropped_frames(cluster: ProxiedCluster) -> int:
    """Return how many KV frames the COMPLETION workers refused; call it when the cluster is idle."""
    return sum(worker["load"]["num_dropped_frames"] for worker in cluster.status()["workers"])


def how_they_ended(answers: list[Answer]) -> Counter[str]:
    return Counter(answer.ends[0] for answer in answers)


@pytest.mark.parametrize("num_requests", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_rough_data_links_cost_attempts_and_no_answer(cluster: ProxiedCluster, num_requests: int) -> None:
    """R10: 1 % of the messages lost, 5 % doubled, 5 % swapped, all 0 to 200 ms late, both ways, KV and answers."""
    with Asker(cluster, threads=24) as asker:
        invariants = Invariants(cluster, asker)
        for proxy in cluster.data.values():
            proxy.to_target.faults = proxy.from_target.faults = ROUGH
        answers = asker.ask_all(range(num_requests), within_s=400)
        for proxy in cluster.data.values():
            proxy.to_target.faults = proxy.from_target.faults = Faults()
        done = cluster.counts(cluster.data.values())
        num_faults = done["dropped"] + done["duplicated"] + done["reordered"]
        report(f"R10: {num_requests} requests, {dict(done)}: {how_they_ended(answers)}")
        assert num_faults >= num_requests / 10
        assert min(done["dropped"], done["duplicated"], done["reordered"]) >= 1
        assert sum(answer.is_complete for answer in answers) >= 0.99 * num_requests, how_they_ended(answers)
        invariants.check(num_faults)


def test_a_frame_that_comes_twice_has_no_effect(cluster: ProxiedCluster) -> None:
    """R10: every doubled frame is dropped at the receiver and counted there; no attempt is lost for it."""
    with Asker(cluster) as asker:
        invariants = Invariants(cluster, asker)
        for proxy in cluster.data.values():
            proxy.to_target.faults = Faults(duplicate=0.5, applies_to=is_kv)
        answers = asker.ask_all(range(40))
        num_doubled = cluster.counts(cluster.data.values())["duplicated"]
        assert all(answer.is_complete for answer in answers)
        assert num_doubled >= 10
        assert cluster.status()["counts"]["num_retries"] == 0
        invariants.check(num_doubled)
        assert num_dropped_frames(cluster) == cluster.counts(cluster.data.values())["duplicated"]


@pytest.mark.parametrize("num_faults", [40, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_every_damaged_frame_is_noticed(cluster: ProxiedCluster, num_faults: int) -> None:
    """R11: bit flips and cut payloads; as many frames are refused as were damaged, and every answer is right."""
    with Asker(cluster, num_tokens=8) as asker:
        invariants = Invariants(cluster, asker)
        for proxy in cluster.data.values():
            proxy.to_target.faults = Faults(flip=0.1, truncate=0.1)
        answers: list[Answer] = []
        while (done := cluster.counts(cluster.data.values()))["flipped"] + done["truncated"] < num_faults:
            answers += asker.ask_all(range(len(answers), len(answers) + 20))
        for proxy in cluster.data.values():
            proxy.to_target.faults = Faults()
        report(f"R11: {len(answers)} requests, {dict(done)}: {how_they_ended(answers)}")
        assert min(done["flipped"], done["truncated"]) >= num_faults / 4
        assert sum(answer.is_complete for answer in answers) >= 0.98 * len(answers), how_they_ended(answers)
        invariants.check(num_faults)
        assert num_dropped_frames(cluster) == done["flipped"] + done["truncated"]
