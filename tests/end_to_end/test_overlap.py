"""KV travels while the prefill runs, and the stage stamps show it (issue: layer-wise transfer)."""

from pathlib import Path

import pytest
from live_cluster import LiveCluster

ENGINE = {"dtype": "float32", "kv_cache_bytes": 1 << 28}


@pytest.mark.slow
def test_most_kv_bytes_arrive_before_the_prefill_ends(smollm2: Path) -> None:
    """2,048 tokens: at least 90 % of the KV bytes are verified by the receiver before the last layer ends."""
    spec = {pool: {"engine": ENGINE} for pool in ("prompt", "completion")}
    with LiveCluster(smollm2, spec) as cluster:
        cluster.complete("warm up", max_tokens=2, ignore_eos=True)
        ids = [token + 20 for token in range(2048)]
        timing = cluster.complete(ids, max_tokens=8, temperature=0, ignore_eos=True, timing=True)["timing"]
    assert timing["num_kv_bytes"] == 2048 * 30 * 2 * 3 * 64 * 4
    assert timing["kv_share_hidden"] >= 0.9
    stages = ("queue_s", "grant_s", "prefill_queue_s", "prefill_s", "return_s")
    assert abs(sum(timing[stage] for stage in stages) - timing["ttft_s"]) < 1e-9
    assert all(timing[stage] >= 0 for stage in stages)
