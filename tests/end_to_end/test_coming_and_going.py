"""Workers that all go and come back, and workers that are replaced one by one while requests run."""

import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster, wait_until
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260
NUM_TOKENS = 40
REFUSED_WITHIN_S, BACK_WITHIN_S = 0.1, 3.0


def pool(num_workers: int, **engine: Any) -> dict[str, Any]:
    return {"num_workers": num_workers, "engine": {"kind": "fake", "num_blocks": 64, **engine}}


def ask(cluster: LiveCluster, number: int) -> None:
    """Send request `number`; fails unless the answer is the only right one."""
    prompt = [(number * 7 + i) % 250 + 4 for i in range(5 + number % 40)]
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number, "return_token_ids": True}
    body = cluster.complete(prompt, **fields)
    assert body["choices"][0]["token_ids"] == expected_tokens(prompt, NUM_TOKENS, VOCAB_SIZE, seed=number)


@pytest.fixture(scope="module")
def pair(tiny_llama: Path) -> Iterator[LiveCluster]:
    """One worker a pool, whose silence is noticed within a second."""
    liveness = {"heartbeat_s": 0.1, "suspect_after_s": 0.7, "gone_after_s": 1.0}
    with LiveCluster(tiny_llama, {"prompt": pool(1), "completion": pool(1), "liveness": liveness}) as cluster:
        yield cluster


def pause(cluster: LiveCluster, names: list[str]) -> None:
    for name in names:
        cluster.kill(name, signal.SIGSTOP)


def go_on(cluster: LiveCluster, names: list[str]) -> None:
    for name in names:
        cluster.kill(name, signal.SIGCONT)


def kill(cluster: LiveCluster, names: list[str]) -> None:
    for name in names:
        cluster.kill(name)


def start(cluster: LiveCluster, names: list[str]) -> None:
    """Start them, and wait until they have said hello: only then are they back."""
    for name in names:
        cluster.start(name)
    wait_until(lambda: all(cluster.worker(name) for name in names), 60, f"{names} back")


def refusals_s(cluster: LiveCluster, count: int) -> list[float]:
    """Ask while nobody is there; return how long each refusal took."""
    took_s: list[float] = []
    for _ in range(count):
        began_s = time.monotonic()
        response = cluster.client.post("/v1/completions", json={"prompt": "x"})
        took_s.append(time.monotonic() - began_s)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert int(response.headers["retry-after"]) >= 1
    return took_s


@pytest.mark.parametrize(
    ("leave", "come_back", "num_times"),
    [
        pytest.param(kill, start, 2, id="kill twice"),
        pytest.param(kill, start, 5, id="kill", marks=[pytest.mark.slow]),
        pytest.param(pause, go_on, 5, id="pause", marks=[pytest.mark.slow]),
    ],
)
@pytest.mark.timeout(400)
def test_all_workers_go_and_come_back(pair: LiveCluster, leave: Any, come_back: Any, num_times: int) -> None:
    """Meanwhile a 503 at once, not a wait; afterwards an answer within three seconds, and the right one."""
    names = pair.names[1:]
    refused_s: list[float] = []
    back_s: list[float] = []
    for number in range(num_times):
        leave(pair, names)
        wait_until(lambda: not pair.status()["workers"], 20, "all workers gone")
        assert pair.client.get("/health/ready").status_code == 503
        refused_s += refusals_s(pair, 10)
        come_back(pair, names)
        began_s = time.monotonic()
        wait_until(lambda: pair.client.get("/health/ready").status_code == 200, 30, "ready again")
        ask(pair, number)
        back_s.append(time.monotonic() - began_s)
    assert statistics.median(refused_s) <= REFUSED_WITHIN_S
    assert statistics.median(back_s) <= BACK_WITHIN_S
    pair.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_worker_is_replaced_twice_and_no_request_fails(tiny_llama: Path) -> None:
    """A rolling restart: each is asked to end (SIGTERM) and started again, with eight requests in flight throughout."""
    pools = {"prompt": pool(2), "completion": pool(2)}
    with LiveCluster(tiny_llama, pools) as cluster, ThreadPoolExecutor(8) as threads:
        is_over = False

        def keep_asking(first: int) -> int:
            number = first
            while not is_over:
                ask(cluster, number)
                number += 8
            return (number - first) // 8

        clients = [threads.submit(keep_asking, first) for first in range(8)]
        try:
            for name in cluster.names[1:] * 2:
                cluster.kill(name, signal.SIGTERM)
                assert cluster.processes[name].wait(20) == 0
                start(cluster, [name])
                cluster.wait_ready()
        finally:
            is_over = True
        num_answers = [client.result(timeout=60) for client in clients]
        assert min(num_answers) > 8
        left = [incident for incident in cluster.status()["incidents"] if incident["what"] == "gone: stopped"]
        assert len(left) == 8
