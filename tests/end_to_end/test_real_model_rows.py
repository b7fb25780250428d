"""Clients that leave and workers that die, with the real chat model; test_disconnects.py has the same with fakes."""

import json
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster, events_in, is_idle, open_stream, read_events, wait_until
from prompts import texts
from tokenizers import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE = {"dtype": "float32", "kv_cache_bytes": 1 << 29, "max_num_batched_tokens": 64, "max_num_seqs": 4}
SPEC: dict[str, Any] = {
    "prompt": {"engine": ENGINE},
    "completion": {"engine": ENGINE},
    "router": {"keep_alive_s": 0.5, "no_worker_grace_s": 0.5, "max_queue_wait_s": 600},
}
STORY = "Once upon a time, in a small village by the sea, there lived"
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG_PROMPT = [token % 40_000 + 20 for token in range(6000)]  # 94 chunks: minutes of work
GenerateGreedy = Callable[[Path, Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def cluster(smollm2: Path) -> Iterator[LiveCluster]:
    with LiveCluster(smollm2, SPEC) as cluster:
        yield cluster


def send(cluster: LiveCluster, prompt: str | list[int], max_tokens: int) -> socket.socket:
    return open_stream(cluster, prompt=prompt, max_tokens=max_tokens, **GREEDY)


def wait_computing(cluster: LiveCluster) -> None:
    wait_until(lambda: cluster.status()["running"], 20, "a request that runs")
    wait_until(lambda: not is_idle(cluster.status()), 20, "a worker that computes")


def text_of(cluster: LiveCluster, max_tokens: int) -> str:
    return cluster.complete(STORY, max_tokens=max_tokens, **GREEDY)["choices"][0]["text"]


def test_a_client_that_leaves_during_prefill_stops_it(cluster: LiveCluster) -> None:
    """H1: closed before the first byte."""
    with send(cluster, LONG_PROMPT, 5):
        wait_computing(cluster)
    cluster.wait_idle(10)


def test_clients_that_leave_disturb_no_stream_and_cost_no_capacity(cluster: LiveCluster) -> None:
    """G11, H2 and H4: 200 leave after 0 to 200 ms; a stream beside them is exact, and so are later ones."""
    expected = text_of(cluster, 60)
    draws = random.Random(11)
    delays_s = [draws.uniform(0.0, 0.2) for _ in range(200)]

    def leave(delay_s: float) -> None:
        with send(cluster, STORY, 40):
            time.sleep(delay_s)

    with ThreadPoolExecutor(8) as threads:
        leaving = [threads.submit(leave, delay_s) for delay_s in delays_s]
        beside = "".join(
            choice["text"] for chunk in cluster.stream(STORY, max_tokens=60, **GREEDY) for choice in chunk["choices"]
        )
        for future in leaving:
            future.result(timeout=300)
    assert beside == expected
    cluster.wait_idle(60)
    with ThreadPoolExecutor(4) as threads:  # as many as run at once
        assert list(threads.map(lambda _: text_of(cluster, 60), range(4))) == [expected] * 4


@pytest.mark.parametrize("victim", ["prompt-0", "completion-0"])
def test_a_pool_that_dies_during_prefill_ends_the_request(cluster: LiveCluster, victim: str) -> None:
    """G6 and G7: an error in seconds; the other side keeps nothing; afterwards all is as before."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(cluster.client.post, "/v1/completions", json={"prompt": LONG_PROMPT, "max_tokens": 5})
        wait_computing(cluster)
        cluster.kill(victim)
        response = future.result(timeout=30)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_worker"
    wait_until(lambda: is_idle(cluster.status()), 20, "the other worker at rest")
    cluster.start(victim)
    cluster.wait_ready()
    assert len(text_of(cluster, 10)) > 10


def test_a_completion_pool_that_dies_in_mid_stream_ends_it_well_formed(cluster: LiveCluster) -> None:
    """G8: at the tenth token; an error event, [DONE] and the end of the body."""
    with send(cluster, STORY, 2000) as connection:
        data = read_events(connection, 10)
        cluster.kill("completion-0")
        *_, error, done = events_in(read_events(connection, data=data))
    assert done == b"[DONE]"
    assert json.loads(error)["error"]["code"] == "no_worker"
    cluster.start("completion-0")
    cluster.wait_ready()


def test_many_transfers_at_once_are_exact(cluster: LiveCluster, smollm2: Path, generate_greedy: GenerateGreedy) -> None:
    """G10: 64 prompts of mixed lengths at once are answered as `generate` does."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts()]
    prompts = [encoded[i % len(encoded)][: 1 + (i * 37) % 160] for i in range(64)]

    def ask(prompt: list[int]) -> list[int]:
        body = cluster.complete(prompt, max_tokens=8, return_token_ids=True, **GREEDY)
        return body["choices"][0]["token_ids"]

    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(ask, prompts))
    assert answers == [generate_greedy(smollm2, prompt, 8) for prompt in prompts]
