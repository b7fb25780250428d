"""Real processes with fake engines, asked for more than they can do: quick refusals, and then all is well again."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_cluster import LiveCluster, wait_until
from twinpool.engine.fake import expected_tokens

ENGINE: dict[str, Any] = {"kind": "fake", "block_size": 8, "num_blocks": 512, "max_model_len": 512}
PROMPT = list(range(100, 164))
MAX_QUEUED = 8


@pytest.fixture(scope="module")
def slow_cluster(smollm2: Path) -> Iterator[LiveCluster]:
    """Prefills five prompts a second, one a step; eight may wait."""
    spec = {
        "prompt": {"engine": ENGINE | {"fake_seconds_per_row": 0.2, "max_num_batched_tokens": 64}},
        "completion": {"engine": ENGINE | {"fake_seconds_per_row": 0.001}},
        "router": {"max_queued_requests": MAX_QUEUED},
    }
    with LiveCluster(smollm2, spec) as cluster:
        yield cluster


async def burst(cluster: LiveCluster, number: int, **fields: Any) -> list[httpx.Response]:
    body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, **fields}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(number)))


def test_a_burst_of_eight_times_what_fits_is_refused_and_then_served_again(slow_cluster: LiveCluster) -> None:
    """I1, I2, I4: 503 with Retry-After, all in the envelope; every worker stays, and takes the next requests."""
    responses = asyncio.run(burst(slow_cluster, 8 * MAX_QUEUED))
    statuses = Counter(response.status_code for response in responses)
    assert set(statuses) == {200, 503}
    assert statuses[200] >= MAX_QUEUED
    for response in responses:
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "queue_full"
            assert 1 <= int(response.headers["retry-after"]) <= 60
    states = {worker["name"]: worker["state"] for worker in slow_cluster.status()["workers"]}
    assert states == {"prompt-0": "alive", "completion-0": "alive"}
    slow_cluster.wait_idle()
    assert slow_cluster.complete(PROMPT, max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_three_times_what_the_pool_holds_goes_through_without_a_standstill(tiny_llama: Path) -> None:
    """200 requests, each of seven blocks at its end, as many at once as want three times the 48 there are.

    Sequences lose their blocks and are resumed; all are answered, rightly, and tokens come in every five seconds.
    """
    engine = {"kind": "fake", "block_size": 16, "num_blocks": 48, "fake_seconds_per_row": 0.0003}
    num_at_once, num_tokens = 3 * 48 // 7, 32
    arrivals_s: list[float] = []

    def ask(number: int) -> None:
        prompt = [(number + i) % 250 + 4 for i in range(75)]
        fields = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number, "return_token_ids": True}
        tokens: list[int] = []
        for chunk in cluster.stream(prompt, **fields):
            arrivals_s.append(time.monotonic())
            tokens += chunk["choices"][0]["token_ids"]
        assert tokens == expected_tokens(prompt, num_tokens, 260, seed=number)

    with LiveCluster(tiny_llama, {"prompt": {"engine": engine}, "completion": {"engine": engine}}) as cluster:
        began_s = time.monotonic()
        with ThreadPoolExecutor(num_at_once) as threads:
            for future in [threads.submit(ask, number) for number in range(200)]:
                future.result(timeout=100)
        assert cluster.status()["counts"]["num_preemptions"] > 0, "the pool was never short of blocks"
    times_s = sorted(arrivals_s)
    assert max(later - earlier for earlier, later in pairwise([began_s, *times_s])) < 5.0


def test_a_full_queue_makes_room_for_another_caller(slow_cluster: LiveCluster) -> None:
    async def both() -> tuple[list[httpx.Response], list[httpx.Response]]:
        loud = asyncio.create_task(burst(slow_cluster, 4 * MAX_QUEUED, user="loud"))
        await asyncio.to_thread(
            wait_until, lambda: slow_cluster.status()["queued"] >= MAX_QUEUED - 1, 20.0, "a full queue"
        )
        return await burst(slow_cluster, 1, user="quiet"), await loud

    quiet, loud = asyncio.run(both())
    assert [response.status_code for response in quiet] == [200]
    assert any(response.status_code == 503 for response in loud)


def test_a_request_whose_time_passes_is_a_504_and_leaves_nothing_behind(slow_cluster: LiveCluster) -> None:
    """While it is computed: its prompt takes six steps of 0.2 s."""
    body = {"prompt": PROMPT * 6, "max_tokens": 2}
    headers = {"x-request-timeout-ms": "400"}
    response = slow_cluster.client.post("/v1/completions", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert "0.4 s" in response.json()["error"]["message"]
    slow_cluster.wait_idle()


def test_clients_that_leave_give_everything_back(slow_cluster: LiveCluster) -> None:
    """H4: forty requests are dropped by their clients; four that come afterwards are served."""

    async def leave() -> None:
        task = asyncio.create_task(burst(slow_cluster, 40))
        await asyncio.to_thread(wait_until, lambda: slow_cluster.status()["running"] > 0, 20.0, "something runs")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    slow_cluster.wait_idle()
    assert [response.status_code for response in asyncio.run(burst(slow_cluster, 4))] == [200] * 4
