"""A PROMPT worker killed in mid-transfer, with the real chat model (row R2); with fakes: test_fault_rows_kills.py."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from nemesis import PROMPT_MOMENTS, KillAt
from prompts import texts
from proxied_cluster import ProxiedCluster
from reports import report
from share import share_of
from tokenizers import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ENGINE = {"dtype": "float32", "kv_cache_bytes": 1 << 28, "max_num_batched_tokens": 32, "max_num_seqs": 8}
SPEC: dict[str, Any] = {
    "prompt": {"num_workers": 2, "engine": ENGINE},
    "completion": {"num_workers": 1, "engine": ENGINE},
    "transfer": {"min_frame_bytes": 1, "max_frame_bytes": 1 << 18},
    "router": {"max_queue_wait_s": 600},
}
NUM_KILLS = share_of(10)


@pytest.fixture(scope="module")
def cluster(smollm2: Path) -> Iterator[ProxiedCluster]:
    with ProxiedCluster(smollm2, SPEC) as cluster:
        yield cluster


def test_kills_in_mid_transfer_change_no_token(cluster: ProxiedCluster, smollm2: Path) -> None:
    """R2: ten times kill -9, 4 in flight; every answer is that of the undisturbed run."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompts = [tokenizer.encode(text[:2000], add_special_tokens=False).ids[:200] for text in texts()]

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "timing": True}
        body = cluster.complete(prompt, **fields)
        return body["choices"][0]["token_ids"], body["timing"]["num_attempts"]

    with ThreadPoolExecutor(4) as threads:
        undisturbed = [tokens for tokens, _ in threads.map(ask, prompts)]
        num_retried = 0
        for number in range(NUM_KILLS):
            moment = PROMPT_MOMENTS[number % len(PROMPT_MOMENTS)]
            found = KillAt(cluster, "prompt-0", moment).among(lambda: list(threads.map(ask, prompts)), 200)
            report(f"R2: killed at {moment}: {[attempts for _, attempts in found]} attempts")
            num_retried += sum(attempts > 1 for _, attempts in found)
            assert [tokens for tokens, _ in found] == undisturbed
            cluster.start("prompt-0")
            cluster.wait_ready()
        assert num_retried >= NUM_KILLS / 2
        cluster.wait_idle(30)
    assert all("Traceback" not in path.read_text() for path in cluster.folder.glob("*.log"))
