"""Prompts with log-probabilities through both pools: the numbers of transformers, whatever else runs or dies."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from live_cluster import LiveCluster
from prompts import texts
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from twinpool.engine.fake import expected_scores

TOLERANCE = 1e-4
VOCAB_SIZE = 260  # of the tiny models' tokenizer
LENGTHS = (1, 2, 40, 300)  # the last needs several chunks


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in texts()]
    return [(ids[i % len(ids)] * 99)[:length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(smollm2: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return transformers' log-softmax, `[tokens, vocab]` for each prompt: row i is about token i + 1."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]


def assert_scores(choice: Any, prompt: list[int], expected: torch.Tensor, max_tokens: int, num_logprobs: int) -> None:
    """Every token's log-probability and those of its alternatives, within the tolerance."""
    logprobs = choice["logprobs"]
    tokens = [*prompt, *choice["token_ids"]]
    assert {len(entries) for entries in logprobs.values() if entries is not None} == {len(prompt) + max_tokens}
    assert logprobs["token_logprobs"][0] is None
    found = torch.tensor(logprobs["token_logprobs"][1:])
    right = expected[: len(tokens) - 1].gather(1, torch.tensor(tokens[1:], dtype=torch.int64)[:, None])[:, 0]
    assert torch.allclose(found, right, atol=TOLERANCE, rtol=0)
    if num_logprobs and len(tokens) > 1:
        assert logprobs["top_logprobs"][0] is None
        best = torch.tensor([sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"][1:]])
        assert torch.allclose(best, expected[: len(tokens) - 1].topk(num_logprobs).values, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("max_tokens", "num_logprobs"), [(0, 10), (1, 0), (1, 1)])
def test_a_scoring_call_gives_the_log_probabilities_of_transformers(
    chat_cluster: LiveCluster,
    prompts: list[list[int]],
    expected: list[torch.Tensor],
    max_tokens: int,
    num_logprobs: int,
) -> None:
    """As lm-eval asks: a list of lists of ids, echo, temperature 0, a seed; one choice a list, in order."""
    fields = {"echo": True, "logprobs": num_logprobs, "max_tokens": max_tokens, "temperature": 0, "seed": 1234}
    body = chat_cluster.client.post(
        "/v1/completions", json={"model": "smollm2", "prompt": prompts, **fields, "return_token_ids": True}
    ).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(prompts)))
    for choice, prompt, right in zip(body["choices"], prompts, expected, strict=True):
        assert_scores(choice, prompt, right, max_tokens, num_logprobs)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(LENGTHS), max_tokens * len(LENGTHS))


def test_texts_and_streams_say_the_same_beside_other_requests(
    chat_cluster: LiveCluster, prompts: list[list[int]], smollm2: Path
) -> None:
    """Several at once, with others that only generate: the joined streams are the whole answers."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    asked = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts[1:3]]
    fields = {"echo": True, "logprobs": 2, "max_tokens": 4, "temperature": 0}

    def stream(text: str) -> tuple[str, dict[str, list[Any]]]:
        choices = [chunk["choices"][0] for chunk in chat_cluster.stream(text, **fields)]
        parts = [choice["logprobs"] for choice in choices]
        joined = {key: [x for part in parts if part for x in part[key]] for key in ("tokens", "token_logprobs")}
        return "".join(choice["text"] for choice in choices), joined

    with ThreadPoolExecutor(9) as pool:
        streams = [pool.submit(stream, text) for text in asked]
        wholes = [pool.submit(chat_cluster.complete, text, **fields) for text in asked]
        others = [pool.submit(chat_cluster.complete, text, max_tokens=8, temperature=0) for text in asked]
        assert all(other.result()["usage"]["completion_tokens"] for other in others)
    for text, streamed, whole in zip(asked, streams, wholes, strict=True):
        choice = whole.result()["choices"][0]
        assert choice["text"].startswith(text)
        joined_text, joined = streamed.result()
        assert joined_text == choice["text"]
        assert joined["tokens"] == choice["logprobs"]["tokens"]
        assert joined["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=TOLERANCE)


@pytest.fixture
def fake_cluster(tiny_llama: Path) -> Iterator[LiveCluster]:
    """A prompt of 160 tokens takes ten steps, half a second."""
    engine = {"kind": "fake", "num_blocks": 64, "max_num_batched_tokens": 16, "fake_seconds_per_row": 0.05}
    pool = {"num_workers": 2, "engine": engine}
    with LiveCluster(tiny_llama, {"prompt": pool, "completion": pool}) as cluster:
        yield cluster


def test_a_prompt_worker_that_dies_while_it_scores_costs_no_score(fake_cluster: LiveCluster) -> None:
    """kill -9 in mid-prefill: what was sent stays, the rest comes from the other worker, each score once."""
    prompts = [[4 + (7 * number + i * i) % 250 for i in range(160)] for number in range(6)]
    has_begun = threading.Event()

    def stream(prompt: list[int]) -> tuple[list[float | None], int]:
        found: list[float | None] = []
        fields = {"echo": True, "logprobs": 3, "max_tokens": 0, "timing": True}
        for chunk in fake_cluster.stream(prompt, **fields):
            if not chunk["choices"]:
                return found, chunk["timing"]["num_attempts"]
            found += chunk["choices"][0]["logprobs"]["token_logprobs"]
            has_begun.set()
        raise AssertionError("no chunk with the timing")

    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [pool.submit(stream, prompt) for prompt in prompts]
        assert has_begun.wait(30)
        fake_cluster.kill("prompt-0")  # both workers have three prompts each
        answers = [each.result(timeout=60) for each in streams]
    for prompt, (found, _) in zip(prompts, answers, strict=True):
        assert found == [None, *(score.logprob for score in expected_scores(prompt, 3, VOCAB_SIZE))]
    assert any(num_attempts > 1 for _, num_attempts in answers), "nothing was lost"
    fake_cluster.start("prompt-0")
    fake_cluster.wait_ready()
