"""Links that lose, double, swap, delay and damage messages: no answer is wrong, no block is lost (rows R10 and R11)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from frame_proxy import Faults
from invariants import Answer, Asker, Invariants
from proxied_cluster import ProxiedCluster, is_kv
from reports import report
from share import share_of

FAKE = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 256, "fake_seconds_per_row": 0.0005}}
SPEC = {"prompt": FAKE, "completion": FAKE}


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path) -> Iterator[ProxiedCluster]:
    with ProxiedCluster(tiny_llama, SPEC, seed=12) as cluster:
        yield cluster


class Tally:
    """What the data links did and what was made of it, since this was made; read it when the cluster is idle."""

    def __init__(self, cluster: ProxiedCluster) -> None:
        self._cluster = cluster
        self._done, self._num_dropped, self._num_retries = self._now()

    @property
    def done(self) -> Counter[str]:
        """What the proxies did."""
        return self._now()[0] - self._done

    @property
    def num_dropped_frames(self) -> int:
        """KV frames that the COMPLETION workers refused."""
        return self._now()[1] - self._num_dropped

    @property
    def num_retries(self) -> int:
        return self._now()[2] - self._num_retries

    def _now(self) -> tuple[Counter[str], int, int]:
        status = self._cluster.status()
        num_dropped = sum(worker["load"]["num_dropped_frames"] for worker in status["workers"])
        return self._cluster.counts(self._cluster.data.values()), num_dropped, status["counts"]["num_retries"]


def disturb(cluster: ProxiedCluster, there: Faults, back: Faults | None = None) -> None:
    """Set what happens to KV on its way, and to the answers to it."""
    for proxy in cluster.data.values():
        proxy.to_target.faults, proxy.from_target.faults = there, back or Faults()


def how_they_ended(answers: list[Answer]) -> Counter[str]:
    return Counter(answer.ends[0] for answer in answers)


@pytest.mark.parametrize(
    ("num_requests", "drop"),
    [(60, 0.03), pytest.param(share_of(1000), 0.01, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_rough_data_links_cost_attempts_and_no_answer(cluster: ProxiedCluster, num_requests: int, drop: float) -> None:
    """R10: of messages 1 % are lost, 5 % doubled, 5 % swapped, all up to 200 ms late, KV and the answers to it."""
    rough = Faults(drop=drop, duplicate=0.05, reorder=0.05, delay_s=(0.0, 0.2))
    with Asker(cluster, threads=24) as asker:
        invariants, tally = Invariants(cluster, asker), Tally(cluster)
        disturb(cluster, rough, rough)
        answers = asker.ask_all(range(num_requests), within_s=400)
        disturb(cluster, Faults())
        done = tally.done
        report(f"R10: {num_requests} requests, {dict(done)}: {how_they_ended(answers)}")
        assert min(done["dropped"], done["duplicated"], done["reordered"]) >= 1
        assert sum(answer.is_complete for answer in answers) >= 0.99 * num_requests, how_they_ended(answers)
        invariants.check(done["dropped"] + done["duplicated"] + done["reordered"])


def test_a_frame_that_comes_twice_has_no_effect(cluster: ProxiedCluster) -> None:
    """R10: every doubled frame is dropped at the receiver and counted there; no attempt is lost for it."""
    with Asker(cluster) as asker:
        invariants, tally = Invariants(cluster, asker), Tally(cluster)
        disturb(cluster, Faults(duplicate=0.5, applies_to=is_kv))
        answers = asker.ask_all(range(40))
        disturb(cluster, Faults())
        assert all(answer.is_complete for answer in answers)
        assert tally.done["duplicated"] >= 10
        assert tally.num_retries == 0
        invariants.check(tally.done["duplicated"])
        assert tally.num_dropped_frames == tally.done["duplicated"]


@pytest.mark.parametrize(
    "num_faults", [40, pytest.param(share_of(500), marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_every_damaged_frame_is_noticed(cluster: ProxiedCluster, num_faults: int) -> None:
    """R11: bit flips and cut payloads; as many frames are refused as were damaged, and every answer is right."""
    with Asker(cluster, num_tokens=8) as asker:
        invariants, tally = Invariants(cluster, asker), Tally(cluster)
        disturb(cluster, Faults(flip=0.1, truncate=0.1))
        answers: list[Answer] = []
        while (done := tally.done)["flipped"] + done["truncated"] < num_faults:
            answers += asker.ask_all(range(len(answers), len(answers) + 20))
        disturb(cluster, Faults())
        report(f"R11: {len(answers)} requests, {dict(done)}: {how_they_ended(answers)}")
        assert min(done["flipped"], done["truncated"]) >= num_faults / 4
        assert sum(answer.is_complete for answer in answers) >= 0.98 * len(answers), how_they_ended(answers)
        invariants.check(num_faults)
        assert tally.num_dropped_frames == done["flipped"] + done["truncated"]
