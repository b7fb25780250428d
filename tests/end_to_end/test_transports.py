"""KV by other means than ZMQ, with real processes: the same answers, and the same recovery when one of them dies."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster, wait_until
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260  # of the tiny models' tokenizer
FAKE = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 64}}
GLOO = {"transport": "gloo", "min_frame_bytes": 512}
GenerateGreedy = Callable[[Path, Sequence[int], int], list[int]]


def ask(cluster: LiveCluster, number: int, num_tokens: int) -> None:
    """Send request `number`; its answer must be the only right one."""
    prompt = [(number * 7 + i) % 250 + 4 for i in range(5 + 7 * number)]
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number}
    body = cluster.complete(prompt, **fields, return_token_ids=True)
    right = expected_tokens(prompt, num_tokens, VOCAB_SIZE, seed=number)
    assert body["choices"][0]["token_ids"] == right, f"request {number}: wrong tokens"


def log_of(cluster: LiveCluster, name: str) -> str:
    return (cluster.folder / f"{name}.log").read_text()


@pytest.fixture
def cluster(tiny_llama: Path) -> Iterator[LiveCluster]:
    with LiveCluster(tiny_llama, {"prompt": FAKE, "completion": FAKE, "transfer": GLOO}) as cluster:
        yield cluster


@pytest.mark.parametrize("victim", ["completion-0", "prompt-0"])
def test_over_gloo_a_killed_worker_costs_no_answer(cluster: LiveCluster, victim: str) -> None:
    """kill -9 in mid-load, on either side of the communicators; the worker comes back and gets new ones."""
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(ask, cluster, number, 100) for number in range(16)]
        wait_until(lambda: cluster.status()["running"] >= 8, 10, "requests that run")
        cluster.kill(victim)
        for future in futures:
            future.result(timeout=40)
        cluster.start(victim)
        cluster.wait_ready()
        for future in [pool.submit(ask, cluster, number, 20) for number in range(8)]:
            future.result(timeout=40)
    for name in ("prompt-0", "prompt-1"):
        assert "goes by gloo (transfer.transport is gloo)" in log_of(cluster, name)


def test_over_gloo_a_real_model_is_exact(tiny_llama: Path, generate_greedy: GenerateGreedy) -> None:
    """Blocks of 16 tokens on one side and of 32 on the other, in chunks."""
    engine: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "max_num_batched_tokens": 64}
    spec = {
        "router": {"max_queue_wait_s": 600},
        "prompt": {"engine": {**engine, "block_size": 16}},
        "completion": {"engine": {**engine, "block_size": 32}},
        "transfer": GLOO,
    }
    prompts = [[(11 * i + n) % 250 + 4 for i in range(n)] for n in (1, 31, 64, 150)]
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with LiveCluster(tiny_llama, spec) as cluster, ThreadPoolExecutor(4) as pool:
        bodies = list(pool.map(lambda prompt: cluster.complete(prompt, **fields), prompts))
        assert "goes by gloo" in log_of(cluster, "prompt-0")
    for prompt, body in zip(prompts, bodies, strict=True):
        assert body["choices"][0]["token_ids"] == generate_greedy(tiny_llama, prompt, 24)
