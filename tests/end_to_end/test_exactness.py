"""I4 with real processes, sockets and models: the cluster's greedy tokens are those of plain `generate`, in float32."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster
from prompts import LENGTHS, texts
from tokenizers import Tokenizer

NUM_TOKENS = 64
GenerateGreedy = Callable[[Path, Sequence[int], int], list[int]]


def prompts_of(folder: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Return one prompt a length, kinds of text in turn, tokenised by the model's own tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts()]
    return [encoded[i % len(encoded)][:length] for i, length in enumerate(lengths)]


def spec_of(
    block_sizes: tuple[int, int],
    max_num_batched_tokens: int,
    num_completion_blocks: int | None = None,
    num_workers: int = 2,
) -> dict[str, Any]:
    engine = {"dtype": "float32", "kv_cache_bytes": 1 << 29, "max_num_batched_tokens": max_num_batched_tokens}
    completion = {**engine, "block_size": block_sizes[1]}
    if num_completion_blocks is not None:
        completion["num_blocks"] = num_completion_blocks
    return {
        "router": {"max_queue_wait_s": 600},  # nobody is refused, however slow the machine is
        "prompt": {"num_workers": num_workers, "engine": {**engine, "block_size": block_sizes[0]}},
        "completion": {"num_workers": num_workers, "engine": completion},
    }


def answers(cluster: LiveCluster, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[dict[str, Any]]:
    """Send all prompts at once, greedy; return each choice with its token ids and timing."""

    def ask(prompt: list[int]) -> dict[str, Any]:
        fields = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body = cluster.complete(prompt, **fields, return_token_ids=True, timing=True)
        return {**body["choices"][0], "timing": body["timing"], "usage": body["usage"]}

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def assert_exact(
    folder: Path,
    prompts: list[list[int]],
    got: list[dict[str, Any]],
    oracle: GenerateGreedy,
    num_tokens: int = NUM_TOKENS,
) -> None:
    for prompt, answer in zip(prompts, got, strict=True):
        assert answer["token_ids"] == oracle(folder, prompt, num_tokens), f"prompt of {len(prompt)} tokens"
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == num_tokens


@pytest.fixture(scope="session")
def generate_once(generate_greedy: GenerateGreedy) -> GenerateGreedy:
    """`generate_greedy`, each answer computed once for all configurations."""

    @lru_cache(maxsize=256)
    def cached(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        return tuple(generate_greedy(folder, prompt, num_tokens))

    return lambda folder, prompt, num_tokens: list(cached(folder, tuple(prompt), num_tokens))


@pytest.mark.parametrize(
    ("model", "block_sizes", "budget"),
    [
        ("tiny_llama", (16, 32), 64),
        pytest.param("tiny_qwen", (32, 32), 512, marks=pytest.mark.slow),
        pytest.param("tiny_llama", (16, 16), 1 << 20, marks=pytest.mark.slow),
    ],
)
def test_tiny_models_answer_as_generate_does(
    request: pytest.FixtureRequest, model: str, block_sizes: tuple[int, int], budget: int, generate_once: GenerateGreedy
) -> None:
    """24 prompts at once through 2 + 2 workers, for block sizes and chunk sizes, and for unequal block sizes."""
    folder: Path = request.getfixturevalue(model)
    prompts = prompts_of(folder, LENGTHS)
    with LiveCluster(folder, spec_of(block_sizes, budget)) as cluster:
        assert_exact(folder, prompts, answers(cluster, prompts), generate_once)


def test_preempted_sequences_are_resumed_exactly(tiny_llama: Path, generate_once: GenerateGreedy) -> None:
    """With so few blocks that sequences lose theirs, every answer is still exact."""
    prompts = prompts_of(tiny_llama, [60 + i for i in range(16)])
    with LiveCluster(tiny_llama, spec_of((16, 16), 512, num_completion_blocks=24)) as cluster:
        got = answers(cluster, prompts)
        assert_exact(tiny_llama, prompts, got, generate_once)
        assert sum(answer["timing"]["num_preemptions"] for answer in got) >= 3


def test_the_default_model_answers_as_generate_does(smollm2: Path, generate_once: GenerateGreedy) -> None:
    """The real chat model, a few prompts of every kind of text; the slow suite has the whole matrix."""
    prompts = prompts_of(smollm2, (1, 33, 150, 300))
    with LiveCluster(smollm2, spec_of((16, 32), 128, num_workers=1)) as cluster:
        assert_exact(smollm2, prompts, answers(cluster, prompts, 12), generate_once, 12)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("budget", [64, 512, 1 << 20])
def test_the_default_model_is_exact_in_every_shape(
    smollm2: Path, generate_once: GenerateGreedy, block_size: int, budget: int
) -> None:
    """Block sizes 16 and 32, chunks of 64, 512 and unlimited."""
    prompts = prompts_of(smollm2, LENGTHS)
    with LiveCluster(smollm2, spec_of((block_size, block_size), budget)) as cluster:
        assert_exact(smollm2, prompts, answers(cluster, prompts), generate_once)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_model_is_exact_under_preemption(smollm2: Path, generate_once: GenerateGreedy) -> None:
    """So few blocks on the COMPLETION workers that at least three sequences are preempted and resumed."""
    prompts = prompts_of(smollm2, [40 + 5 * i for i in range(24)])
    with LiveCluster(smollm2, spec_of((16, 16), 512, num_completion_blocks=30)) as cluster:
        got = answers(cluster, prompts)
        assert_exact(smollm2, prompts, got, generate_once)
        assert sum(answer["timing"]["num_preemptions"] for answer in got) >= 3
