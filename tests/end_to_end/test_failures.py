"""Processes die under load: no accepted request hangs, no answer is wrong, every block comes home."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster, wait_until
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260  # of the tiny models' tokenizer
FAKE = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 64}}


@pytest.fixture
def cluster(tiny_llama: Path) -> Iterator[LiveCluster]:
    with LiveCluster(tiny_llama, {"prompt": FAKE, "completion": FAKE}) as cluster:
        yield cluster


def ask(cluster: LiveCluster, number: int, num_tokens: int = 150) -> dict[str, Any]:
    """Send request `number`; return its body. The fake engine makes its only right answer known."""
    prompt = [(number * 7 + i) % 250 + 4 for i in range(5 + number)]
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number}
    body = cluster.complete(prompt, **fields, return_token_ids=True, timing=True)
    right = expected_tokens(prompt, num_tokens, VOCAB_SIZE, seed=number)
    assert body["choices"][0]["token_ids"] == right, f"request {number}: wrong tokens"
    return body


def ask_many(cluster: LiveCluster, pool: ThreadPoolExecutor, count: int) -> list[Future[dict[str, Any]]]:
    return [pool.submit(ask, cluster, number) for number in range(count)]


@pytest.mark.parametrize("victim", ["completion-0", "prompt-0"])
def test_a_killed_worker_costs_no_answer(cluster: LiveCluster, victim: str) -> None:
    """kill -9 in mid-load: all 16 answers are right, none takes longer than 10 s more; the worker may come back."""
    began_s = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        futures = ask_many(cluster, pool, 16)
        wait_until(lambda: cluster.status()["running"] >= 8, 10, "requests that run")
        cluster.kill(victim)
        bodies = [future.result(timeout=30) for future in futures]
    assert time.monotonic() - began_s < 20
    if victim == "completion-0":
        assert sum(body["timing"]["num_attempts"] > 1 for body in bodies) >= 1
    incidents = [i["what"] for i in cluster.status()["incidents"] if i["worker"] == victim]
    assert any(what.startswith("gone: ") for what in incidents), incidents
    cluster.start(victim)
    cluster.wait_ready()
    assert len(cluster.status()["workers"]) == 4


def test_a_worker_that_is_told_to_end_costs_no_answer_and_no_time(cluster: LiveCluster) -> None:
    """SIGTERM in mid-load: it says goodbye, so that its requests go on elsewhere without waiting for its silence."""
    with ThreadPoolExecutor(8) as pool:
        futures = ask_many(cluster, pool, 8)
        wait_until(lambda: cluster.status()["running"] >= 4, 10, "requests that run")
        cluster.kill("completion-0", signal.SIGTERM)
        assert cluster.processes["completion-0"].wait(10) == 0
        for future in futures:
            future.result(timeout=30)
    incidents = [i["what"] for i in cluster.status()["incidents"] if i["worker"] == "completion-0"]
    assert "gone: stopped" in incidents
    cluster.start("completion-0")
    cluster.wait_ready()


def test_a_stopped_worker_that_wakes_up_late_does_no_harm(cluster: LiveCluster) -> None:
    """SIGSTOP beyond the liveness limit: its requests move; after SIGCONT it joins again as a new incarnation."""
    before = cluster.worker("completion-0")
    assert before is not None
    with ThreadPoolExecutor(8) as pool:
        futures = ask_many(cluster, pool, 8)
        wait_until(lambda: cluster.status()["running"] >= 4, 10, "requests that run")
        cluster.kill("completion-0", signal.SIGSTOP)
        wait_until(lambda: cluster.worker("completion-0") is None, 10, "the stopped worker declared gone")
        for future in futures:
            future.result(timeout=30)
    cluster.kill("completion-0", signal.SIGCONT)
    after = wait_until(lambda: cluster.worker("completion-0"), 10, "the worker that woke up")
    assert after["pid"] == before["pid"]
    assert after["incarnation"] != before["incarnation"]


def test_a_restarted_router_finds_its_workers_again(cluster: LiveCluster) -> None:
    """The router's death drops what it had granted; the same workers serve the next router."""
    threads = Path(f"/proc/{cluster.processes['prompt-0'].pid}/task")
    num_threads_before = len(os.listdir(threads))
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            futures = ask_many(cluster, pool, 8)
            wait_until(lambda: cluster.status()["running"] >= 4, 10, "requests that run")
            cluster.kill("router")
            assert all(future.exception(timeout=30) is not None for future in futures), "connections to a dead router"
        cluster.start("router")
        cluster.wait_ready()
        cluster.wait_idle()
        with ThreadPoolExecutor(8) as pool:
            for future in ask_many(cluster, pool, 8):
                future.result(timeout=30)
    # Regression: a PROMPT worker kept a thread and a connection to every earlier incarnation of a COMPLETION worker.
    num_peers = cluster.spec.completion.num_workers
    assert len(os.listdir(threads)) <= num_threads_before + num_peers, "a thread for each that it sends to, and no more"


def test_when_a_whole_pool_is_gone_requests_end_with_an_error_and_it_recovers(cluster: LiveCluster) -> None:
    """No COMPLETION worker: new requests get 503 at once, accepted ones within the grace; then all is well again."""
    with ThreadPoolExecutor(4) as pool:
        futures = ask_many(cluster, pool, 4)
        wait_until(lambda: cluster.status()["running"] >= 2, 10, "requests that run")
        for name in ("completion-0", "completion-1"):
            cluster.kill(name)
        errors = [future.exception(timeout=30) for future in futures]
    assert all("no_worker" in str(error) for error in errors), errors
    response = cluster.client.post("/v1/completions", json={"model": cluster.model, "prompt": "x"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_worker"
    assert "retry-after" in response.headers
    for name in ("completion-0", "completion-1"):
        cluster.start(name)
    cluster.wait_ready()
    ask(cluster, 1)
