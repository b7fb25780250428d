"""One cluster that serves the real chat model, for all tests that send it requests and harm none of its processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_cluster import LiveCluster


@pytest.fixture(scope="session")
def chat_cluster(smollm2: Path) -> Iterator[LiveCluster]:
    """SmolLM2 in float32, one worker a pool; at the end everything must be idle and end by itself.

    Nobody is refused for a long wait: many tests ask much at once, and some machines are slow.
    """
    engine = {"dtype": "float32", "kv_cache_bytes": 1 << 29, "max_num_batched_tokens": 512}
    router = {"max_queue_wait_s": 600}
    pools = {"prompt": {"engine": engine}, "completion": {"engine": engine}}
    with LiveCluster(smollm2, {**pools, "router": router, "served_model_name": "smollm2"}) as cluster:
        yield cluster
