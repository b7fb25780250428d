"""A sampled request answers the same alone, beside others, and after its COMPLETION worker was killed in mid-stream."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster, wait_until

SAMPLED = {"temperature": 0.8, "seed": 7, "max_tokens": 120, "ignore_eos": True}
LONG = {**SAMPLED, "max_tokens": 1600}  # outlasts several heartbeats, which tell who holds it, on any machine
ENGINE = {"dtype": "float32", "kv_cache_bytes": 1 << 28}
PROMPT = "Tell me about the river and the old mill."


@pytest.fixture
def cluster(tiny_llama: Path) -> Any:
    pools = {pool: {"num_workers": 2, "engine": ENGINE} for pool in ("prompt", "completion")}
    with LiveCluster(tiny_llama, pools) as cluster:
        yield cluster


def holder_of_the_stream(cluster: LiveCluster) -> str | None:
    """Return the COMPLETION worker that runs the only sequence there is."""
    loads = {w["name"]: w["load"] for w in cluster.status()["workers"] if w["role"] == "COMPLETION" and w["load"]}
    return next((name for name, load in loads.items() if load["num_sequences"]), None)


@pytest.mark.slow
def test_a_sampled_request_is_the_same_alone_in_company_and_after_a_kill(cluster: LiveCluster) -> None:
    """Sampling depends on logits, parameters, seed and position, and on nothing else."""
    alone = cluster.complete(PROMPT, **SAMPLED)["choices"][0]["text"]
    other_seed = cluster.complete(PROMPT, **{**SAMPLED, "seed": 8})["choices"][0]["text"]
    assert other_seed != alone

    with ThreadPoolExecutor(8) as pool:
        company = [pool.submit(cluster.complete, f"{PROMPT} {i}", **{**SAMPLED, "seed": i}) for i in range(7)]
        beside = pool.submit(cluster.complete, PROMPT, **SAMPLED).result()["choices"][0]["text"]
        for other in company:
            other.result()
    assert beside == alone

    long_alone = cluster.complete(PROMPT, **LONG)["choices"][0]["text"]
    cluster.wait_idle()  # else the worker that held the last one may still be reported as holding it
    text, killed, timing = "", None, None
    for chunk in cluster.stream(PROMPT, timing=True, **LONG):
        text += "".join(choice["text"] for choice in chunk["choices"])
        timing = chunk.get("timing") or timing
        if killed is None and text:
            killed = wait_until(lambda: holder_of_the_stream(cluster), 10, "a worker that reports the sequence")
            cluster.kill(killed)
    assert killed is not None
    assert timing is not None
    assert timing["num_attempts"] == 2, "it was killed in mid-stream"
    assert text == long_alone
    cluster.start(killed)
    cluster.wait_ready()
