"""A KV block that is read after it was freed changes tokens, because test clusters poison what is freed."""

from pathlib import Path

import pytest
from faulty_role import faulty_program
from invariants import prompt_of, right_tokens
from live_cluster import LiveCluster


@pytest.mark.parametrize("is_poisoned", [True, False])
def test_a_planted_use_after_free_is_seen_only_with_poison(tiny_llama: Path, is_poisoned: bool) -> None:
    """One request alone: nobody takes its freed blocks, so that without poison the bug gives the right answer."""
    engine = {"kind": "fake", "num_blocks": 64} | ({} if is_poisoned else {"poison_freed_blocks": False})
    cluster = LiveCluster(tiny_llama, {"prompt": {"engine": engine}, "completion": {"engine": engine}})
    cluster.programs["completion-0"] = faulty_program("free while in use", "completion-0")
    with cluster:
        body = cluster.complete(prompt_of(1, 40), max_tokens=6, seed=1, ignore_eos=True, return_token_ids=True)
    is_right = body["choices"][0]["token_ids"] == right_tokens(1, 40, 6)
    assert is_right != is_poisoned
