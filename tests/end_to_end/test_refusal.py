"""I7: a worker that does not fit the cluster is refused at hello, by a message that names both values."""

from pathlib import Path

from live_cluster import LiveCluster, wait_until


def test_a_worker_of_another_dtype_is_refused_and_says_why(tiny_llama: Path) -> None:
    """The refused worker ends with exit code 3; the incident and its log name what it has and what the cluster has."""
    engine = {"num_blocks": 16, "block_size": 16}
    spec = {
        "prompt": {"engine": {**engine, "dtype": "float32"}},
        "completion": {"engine": {**engine, "dtype": "bfloat16"}},
    }
    cluster = LiveCluster(tiny_llama, spec)
    try:
        cluster.start("router")
        cluster.start("prompt-0")
        wait_until(cluster.is_listening, 30, "the router")
        wait_until(lambda: cluster.worker("prompt-0"), 30, "the PROMPT worker")
        cluster.start("completion-0")
        assert cluster.processes["completion-0"].wait(30) == 3
        incident = next(i["what"] for i in cluster.status()["incidents"] if i["worker"] == "completion-0")
        log = cluster.logs()
        assert cluster.client.get("/health/ready").status_code == 503
    finally:
        cluster.close()
    for text in (incident, log):
        assert "dtype 'bfloat16' where the cluster has 'float32'" in text
