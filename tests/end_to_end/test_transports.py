"""KV by other means than ZMQ, with real processes: the same answers, and the same recovery when one of them dies."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_cluster import LiveCluster, wait_until
from share import share_of
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260  # of the tiny models' tokenizer
FAKE = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 64}}
GLOO = {"transport": "gloo", "min_frame_bytes": 512}


def ask(cluster: LiveCluster, number: int, num_tokens: int) -> None:
    """Send request `number`; its answer must be the only right one."""
    prompt = [(number * 7 + i) % 250 + 4 for i in range(5 + 7 * number)]
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number}
    body = cluster.complete(prompt, **fields, return_token_ids=True)
    right = expected_tokens(prompt, num_tokens, VOCAB_SIZE, seed=number)
    assert body["choices"][0]["token_ids"] == right, f"request {number}: wrong tokens"


def log_of(cluster: LiveCluster, name: str) -> str:
    return (cluster.folder / f"{name}.log").read_text()


def kill_in_mid_load(cluster: LiveCluster, victim: str, num_requests: int) -> None:
    """kill -9 while answers are on their way; all of them are right, and the worker comes back and serves."""
    with ThreadPoolExecutor(num_requests) as pool:
        futures = [pool.submit(ask, cluster, number, 60) for number in range(num_requests)]
        wait_until(lambda: cluster.status()["running"] >= num_requests // 2, 10, "requests that run")
        cluster.kill(victim)
        for future in futures:
            future.result(timeout=60)
    cluster.start(victim)
    cluster.wait_ready()


def test_over_gloo_a_killed_worker_costs_no_answer(tiny_llama: Path) -> None:
    """On either side of the communicators; at the end every block is home, as LiveCluster asserts."""
    with LiveCluster(tiny_llama, {"prompt": FAKE, "completion": FAKE, "transfer": GLOO}) as cluster:
        for victim in ("completion-0", "prompt-0"):
            kill_in_mid_load(cluster, victim, 12)
        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(ask, cluster, number, 20) for number in range(8)]:
                future.result(timeout=60)
        for name in ("prompt-0", "prompt-1"):
            assert "goes by gloo (transfer.transport is gloo)" in log_of(cluster, name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["completion-0", "prompt-0"])
def test_over_gloo_worker_after_worker_is_killed(tiny_llama: Path, victim: str) -> None:
    """Ten times the same one, under more load: nothing is used up by it."""
    with LiveCluster(tiny_llama, {"prompt": FAKE, "completion": FAKE, "transfer": GLOO}) as cluster:
        for _ in range(share_of(10)):
            kill_in_mid_load(cluster, victim, 16)
