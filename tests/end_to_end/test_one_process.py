"""What crosses the split crosses it whole: for every field, two pools answer as one process does."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster
from one_process import OneProcess, PlainAnswer

PROMPT = "Once upon a time, in a small village by the sea, there lived"
EOS = 2
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Greedy:
    """What the greedy answer is: fields that must meet it are made from it."""

    token_ids: list[int]
    text: str


# Each crosses the split: the first token is chosen by the PROMPT worker, the others by the COMPLETION worker.
CASES: dict[str, Callable[[Greedy], dict[str, Any]]] = {
    "greedy": lambda greedy: {"temperature": 0},
    "temperature": lambda greedy: {"temperature": 1.4, "seed": -(2**63)},
    "top_p": lambda greedy: {"top_p": 0.4},
    "top_k": lambda greedy: {"top_k": 3, "temperature": 2},
    "min_p": lambda greedy: {"min_p": 0.3, "temperature": 1.5},
    "presence_penalty": lambda greedy: {"presence_penalty": 2, "temperature": 0},
    "frequency_penalty": lambda greedy: {"frequency_penalty": -2, "temperature": 0},
    "repetition_penalty": lambda greedy: {"repetition_penalty": 2, "temperature": 0},
    "logit_bias": lambda greedy: {"logit_bias": {"28": 9, str(greedy.token_ids[0]): -100}},
    "stop at the first token": lambda greedy: {"temperature": 0, "stop": greedy.text[:2]},
    "stop kept": lambda greedy: {"temperature": 0, "stop": greedy.text[8:14], "include_stop_str_in_output": True},
    "stop after min_tokens": lambda greedy: {"temperature": 0, "stop": greedy.text[1:3], "min_tokens": 3},
    "stop_token_ids": lambda greedy: {"temperature": 0, "stop_token_ids": [greedy.token_ids[4], 49151]},
    "stop_token_ids, first": lambda greedy: {"temperature": 0, "stop_token_ids": greedy.token_ids[:1]},
    "min_tokens": lambda greedy: {"temperature": 0, "stop_token_ids": greedy.token_ids[:3], "min_tokens": 3},
    "end of sequence, later": lambda greedy: {"logit_bias": {str(EOS): 100}, "min_tokens": 4},
    "ignore_eos": lambda greedy: {"logit_bias": {str(EOS): 100}, "ignore_eos": True, "max_tokens": 3},
    "special tokens shown": lambda greedy: {
        "logit_bias": {str(EOS): 100},
        "ignore_eos": True,
        "max_tokens": 2,
        "skip_special_tokens": False,
    },
    "one token": lambda greedy: {"max_tokens": 1},
    "most alternatives": lambda greedy: {"logprobs": 20},
    "n": lambda greedy: {"n": 2},
    "best_of": lambda greedy: {"n": 2, "best_of": 3},
    "everything": lambda greedy: {
        "n": 2,
        "temperature": 1.2,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"28": -5, "30": 2.5},
        "min_tokens": 2,
        "stop": [".", ","],
    },
}


@pytest.fixture(scope="module")
def one_process(smollm2: Path) -> OneProcess:
    return OneProcess(smollm2, EOS)


def assert_same(choice: dict[str, Any], plain: PlainAnswer) -> None:
    assert choice["token_ids"] == plain.token_ids
    assert choice["text"] == plain.text
    assert choice["finish_reason"] == plain.finish_reason
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([token.logprob for token in plain.tokens], abs=TOLERANCE)
    for top, token in zip(logprobs["top_logprobs"] or [], plain.tokens, strict=bool(plain.fields["logprobs"])):
        assert sorted(top.values()) == pytest.approx(sorted(logprob for _, logprob in token.top), abs=TOLERANCE)


def test_every_field_crosses_the_split(chat_cluster: LiveCluster, one_process: OneProcess) -> None:
    """Token ids, texts and ends are equal, log-probabilities within 1e-4, several sent at once."""
    base = {"max_tokens": 5, "seed": 11, "logprobs": 2}
    [[plain]] = one_process.complete(PROMPT, [base | {"temperature": 0}])
    greedy = Greedy(plain.token_ids, plain.text)
    requests = [base | make(greedy) for make in CASES.values()]
    with ThreadPoolExecutor(16) as pool:
        got = pool.map(lambda fields: chat_cluster.complete(PROMPT, **fields, return_token_ids=True), requests)
        expected = one_process.complete(PROMPT, requests)
        bodies = list(got)
    for name, body, answers in zip(CASES, bodies, expected, strict=True):
        assert len(body["choices"]) == len(answers), name
        for choice, answer in zip(body["choices"], answers, strict=True):
            try:
                assert_same(choice, answer)
            except AssertionError as error:
                raise AssertionError(f"{name}: {choice} is not {answer}") from error
