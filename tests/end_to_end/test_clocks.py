"""Time that jumps and time that stands still: the wall clock decides nothing, and a router's own stall kills nobody."""

import datetime
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster, wait_until
from share import share_of
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260
STALL_S = 5.0
JUMP_S = 0.25  # how long the clock shows each of its three times
HOUR_S = 3600
# Python runs this in each process that it starts: from then on the wall clock says: right, an hour late, an hour early.
JUMPING_CLOCK = f"""
import time

right = time.time


def jumping():
    return right() + {HOUR_S} * (int(time.monotonic() / {JUMP_S}) % 3 - 1)


time.time, time.time_ns = jumping, lambda: int(jumping() * 1e9)
"""


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Two fake workers a pool with the default limits; in every process the wall clock jumps."""
    folder = tmp_path_factory.mktemp("jumping")
    (folder / "jumping_clock.py").write_text(JUMPING_CLOCK)
    pool = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 64, "fake_seconds_per_row": 0.005}}
    spec = {"prompt": pool, "completion": pool, "log_format": "json"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("TWINPOOL_ALSO", "jumping_clock")
        with LiveCluster(tiny_llama, spec) as cluster:
            yield cluster


def ask(cluster: LiveCluster, number: int, num_tokens: int) -> dict[str, Any]:
    prompt = [(number * 7 + i) % 250 + 4 for i in range(5 + number)]
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number, "return_token_ids": True, "timing": True}
    body = cluster.complete(prompt, **fields)
    assert body["choices"][0]["token_ids"] == expected_tokens(prompt, num_tokens, VOCAB_SIZE, seed=number)
    return body


def gone(cluster: LiveCluster) -> list[str]:
    return [incident["what"] for incident in cluster.status()["incidents"] if "gone" in incident["what"]]


def incarnations(cluster: LiveCluster) -> dict[str, str]:
    return {worker["name"]: worker["incarnation"] for worker in cluster.status()["workers"]}


def offsets_in_log(cluster: LiveCluster, name: str) -> set[int]:
    """Return by how many hours the times in a log are off."""
    lines = [json.loads(line) for line in (cluster.folder / f"{name}.log").read_text().splitlines()]
    now_s = time.time()
    return {round((datetime.datetime.fromisoformat(line["ts"]).timestamp() - now_s) / HOUR_S) for line in lines}


def test_a_wall_clock_that_jumps_by_an_hour_changes_nothing(cluster: LiveCluster) -> None:
    """Twenty jumps under load: right answers, sane times, no attempt repeated, nobody gone."""
    before = incarnations(cluster)
    end_s = time.monotonic() + 20 * JUMP_S
    bodies: list[dict[str, Any]] = []
    with ThreadPoolExecutor(8) as threads:
        while time.monotonic() < end_s:
            bodies += threads.map(lambda number: ask(cluster, number, 20), range(8))
    assert offsets_in_log(cluster, "router") == {-1, 0, 1}, "the clock of the router did not jump"
    assert len(bodies) >= 16
    for body in bodies:
        assert body["timing"]["num_attempts"] == 1
        assert 0 < body["timing"]["ttft_s"] < 60
    assert gone(cluster) == []
    assert incarnations(cluster) == before
    cluster.wait_idle()


@pytest.mark.parametrize(
    "num_stalls", [1, pytest.param(share_of(20), marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_router_that_stood_still_declares_nobody_dead(cluster: LiveCluster, num_stalls: int) -> None:
    """SIGSTOP for longer than any worker may be silent, in the midst of answers: they go on, and are right."""
    before = incarnations(cluster)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(num_stalls):
            futures = [threads.submit(ask, cluster, number, 150) for number in range(8)]
            wait_until(lambda: cluster.status()["running"] == 8, 20, "requests that run")
            cluster.kill("router", signal.SIGSTOP)
            time.sleep(STALL_S)
            cluster.kill("router", signal.SIGCONT)
            for future in futures:
                future.result(timeout=60)
            assert gone(cluster) == []
    assert incarnations(cluster) == before
    cluster.wait_idle()
