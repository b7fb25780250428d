"""Links that carry nothing for a while, with every process alive at both ends (rows R7, R8 and R9).

A stalled link is half-open: neither end is told anything, not even that the other one has closed. What was under way
arrives when the stall ends, as TCP's retransmissions do.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frame_proxy import Direction, FrameProxy
from invariants import Answer, Asker, Invariants
from live_cluster import wait_until
from nemesis import clog_and_release
from proxied_cluster import ProxiedCluster
from reports import report
from share import share_of

ENGINE = {"kind": "fake", "num_blocks": 256, "max_num_batched_tokens": 32, "fake_seconds_per_row": 0.005}
POOLS: dict[str, Any] = {pool: {"num_workers": 2, "engine": ENGINE} for pool in ("prompt", "completion")}
SPEC = {**POOLS, "transfer": {"min_frame_bytes": 1}}
DETECTION_S = 4.0
slow = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path) -> Iterator[ProxiedCluster]:
    with ProxiedCluster(tiny_llama, SPEC) as cluster:
        yield cluster


def asker_of(cluster: ProxiedCluster) -> Asker:
    return Asker(cluster, num_prompt_tokens=100, num_tokens=60)


def how_they_ended(answers: list[Answer]) -> str:
    attempts = Counter(answer.num_attempts for answer in answers)
    return f"{dict(Counter(answer.ends[0] for answer in answers))}, attempts {dict(attempts)}"


def halves(proxy: FrameProxy, ways: str) -> tuple[Direction, ...]:
    """Return which directions of `proxy` are meant: the KV, its answers, or both."""
    return {"kv": (proxy.to_target,), "answers": (proxy.from_target,), "both": proxy.directions}[ways]


PARTITIONS = [(ways, s) for ways in ("both", "kv", "answers") for s in (1.0, 5.0, 15.0)]


@pytest.mark.parametrize(
    "partitions",
    [
        pytest.param([("both", 1.0), ("kv", 5.0)], id="two"),
        pytest.param(PARTITIONS * share_of(2), id="18", marks=slow),
    ],
)
def test_pools_that_cannot_reach_each_other_lose_no_answer(
    cluster: ProxiedCluster, partitions: list[tuple[str, float]]
) -> None:
    """R7: no KV to, or no answer from, one COMPLETION worker, while the router sees all; healed without a restart."""
    with asker_of(cluster) as asker:
        invariants = Invariants(cluster, asker)
        pids = {name: process.pid for name, process in cluster.processes.items()}
        for ways, pause_s in partitions:
            proxy = cluster.data["completion-0"]
            began_s = time.monotonic()
            futures = asker.begin(range(8))
            with proxy.stalled(*halves(proxy, ways)):
                time.sleep(pause_s)
            answers = [future.result(timeout=60) for future in futures]
            longest_s = max(answer.seconds for answer in answers)
            report(f"R7: {ways} for {pause_s:g} s: {how_they_ended(answers)}, longest {longest_s:.1f} s")
            assert all(answer.is_complete for answer in answers), how_they_ended(answers)
            assert time.monotonic() - began_s < 40
        assert {name: process.pid for name, process in cluster.processes.items()} == pids
        invariants.check(len(partitions))


@pytest.mark.parametrize(
    "num_rounds", [pytest.param(2, id="2 rounds"), pytest.param(share_of(30), id="30 rounds", marks=slow)]
)
def test_links_that_stop_and_go_in_random_order_harm_nobody(cluster: ProxiedCluster, num_rounds: int) -> None:
    """R8: all six links stalled one by one, and let go one by one, under load; from quick rounds to long ones."""
    with asker_of(cluster) as asker:
        invariants = Invariants(cluster, asker)
        for number in range(num_rounds):
            draws = random.Random(number)
            futures = asker.begin(range(8))
            clog_and_release(cluster.proxies, draws, max_gap_s=draws.choice([0.05, 0.3, 1.0]))
            answers = [future.result(timeout=60) for future in futures]
            report(f"R8: round {number}: {how_they_ended(answers)}")
            cluster.wait_ready(10)
        num_links = len(cluster.proxies)
        invariants.check(num_rounds * num_links)


def test_a_half_open_control_link_is_noticed_before_anybody_needs_it(cluster: ProxiedCluster) -> None:
    """R9: idle, then silent: the worker is gone within 4 s, and back soon after; requests meanwhile go to others."""
    with asker_of(cluster) as asker:
        invariants = Invariants(cluster, asker)
        for name in ("prompt-0", "completion-0"):
            with cluster.control[name].stalled():
                began_s = time.monotonic()
                wait_until(lambda name=name: cluster.worker(name) is None, 10, f"{name} declared gone")
                report(f"R9: {name} gone {time.monotonic() - began_s:.1f} s after its link fell silent")
                assert time.monotonic() - began_s <= DETECTION_S
                assert all(answer.is_complete for answer in asker.ask_all(range(8)))
            wait_until(lambda name=name: cluster.worker(name), 10, f"{name} back")
        invariants.check(2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_times", [share_of(8)])
def test_a_half_open_data_link_delays_its_requests_and_loses_none(cluster: ProxiedCluster, num_times: int) -> None:
    """R9: the KV connection dies unseen while it idles; traffic comes 4 s later, and the link 4 s after that."""
    with asker_of(cluster) as asker:
        invariants = Invariants(cluster, asker)
        for _ in range(num_times):
            with cluster.data["completion-0"].stalled():
                time.sleep(4)
                futures = asker.begin(range(8))
                time.sleep(4)
            answers = [future.result(timeout=60) for future in futures]
            longest_s = max(answer.seconds for answer in answers)
            report(f"R9: data: {how_they_ended(answers)}, longest {longest_s:.1f} s")
            assert all(answer.is_complete for answer in answers), how_they_ended(answers)
        invariants.check(num_times)
