"""The two sides may be of different shape: blocks, their number, frames. The answers are the same."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260  # of the tiny models' tokenizer
LENGTHS = (1, 15, 16, 17, 100, 333)
SMALL_FRAMES = {"max_frame_bytes": 4096, "min_frame_bytes": 1, "credit_bytes": 1 << 16}
ONE_FRAME = {"max_frame_bytes": 1 << 22, "min_frame_bytes": 1 << 22}
GenerateGreedy = Callable[[Path, Sequence[int], int], list[int]]


def prompts() -> list[list[int]]:
    return [[(11 * i + length) % 250 + 4 for i in range(length)] for length in LENGTHS]


def spec(
    shared: dict[str, Any], blocks: tuple[tuple[int, int], tuple[int, int]], transfer: dict[str, Any]
) -> dict[str, Any]:
    (prompt_size, prompt_num), (completion_size, completion_num) = blocks
    return {
        "router": {"max_queue_wait_s": 600},
        "prompt": {"engine": {**shared, "block_size": prompt_size, "num_blocks": prompt_num}},
        "completion": {"engine": {**shared, "block_size": completion_size, "num_blocks": completion_num}},
        "transfer": transfer,
    }


def answers(cluster: LiveCluster, num_tokens: int, **fields: Any) -> list[list[int]]:
    """Send all prompts at once; return each answer's token ids."""
    more = {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True, **fields}
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        bodies = list(pool.map(lambda prompt: cluster.complete(prompt, **more), prompts()))
    return [body["choices"][0]["token_ids"] for body in bodies]


@pytest.mark.parametrize(
    ("blocks", "transfer"),
    [
        (((4, 200), (32, 40)), SMALL_FRAMES),
        pytest.param(((32, 16), (5, 300)), {**SMALL_FRAMES, "transport": "gloo"}, marks=pytest.mark.slow),
        pytest.param(((7, 100), (64, 20)), ONE_FRAME, marks=pytest.mark.slow),
        pytest.param(((1, 700), (1024, 6)), SMALL_FRAMES, marks=pytest.mark.slow),
        pytest.param(((1024, 1), (3, 400)), ONE_FRAME, marks=pytest.mark.slow),
    ],
)
def test_every_byte_finds_its_place(
    tiny_llama: Path, blocks: tuple[tuple[int, int], tuple[int, int]], transfer: dict[str, Any]
) -> None:
    """With fake engines, whose tokens are a hash of all the KV: one row in a wrong place, and the answer is another."""
    shared = {"kind": "fake", "max_num_batched_tokens": 50, "max_model_len": 400}
    with LiveCluster(tiny_llama, spec(shared, blocks, transfer)) as cluster:
        got = answers(cluster, 20, seed=5)
    assert got == [expected_tokens(prompt, 20, VOCAB_SIZE, seed=5) for prompt in prompts()]


@pytest.mark.parametrize(
    ("blocks", "transfer"),
    [
        (((16, 60), (24, 60)), {**SMALL_FRAMES, "transport": "gloo"}),
        (((8, 100), (24, 60)), SMALL_FRAMES),
        (((64, 12), (16, 90)), ONE_FRAME),
        (((32, 30), (16, 90)), {**ONE_FRAME, "transport": "gloo"}),
    ],
)
@pytest.mark.slow
def test_a_real_model_answers_as_generate_does(
    tiny_llama: Path,
    blocks: tuple[tuple[int, int], tuple[int, int]],
    transfer: dict[str, Any],
    generate_greedy: GenerateGreedy,
) -> None:
    shared = {"dtype": "float32", "max_num_batched_tokens": 64, "max_model_len": 400}
    with LiveCluster(tiny_llama, spec(shared, blocks, transfer)) as cluster:
        got = answers(cluster, 12, temperature=0)
        log = (cluster.folder / "prompt-0.log").read_text()
    assert f"goes by {transfer.get('transport', 'zmq')}" in log
    assert got == [generate_greedy(tiny_llama, prompt, 12) for prompt in prompts()]
