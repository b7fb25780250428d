"""Bodies of every endpoint, damaged, random and with values of another kind: a request, or a 4xx, and quickly."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from fuzzing import assert_small, count_refused, damaged, with_one_hostile
from twinpool.cluster.protocol.errors import InvalidRequestError
from twinpool.router.openai.http import parse_json_object
from twinpool.router.openai.requests import ChatBody, CompletionBody, parse_body, parse_known
from twinpool.router.openai.tokenize import DetokenizeBody, TokenizeChatBody, TokenizeTextBody

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x", "y"]}}, "required": ["a"]}
TOOL: Json = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL: Json = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SHARED: Json = {
    "model": "tiny",
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.5,
    "n": 2,
    "stop": ["a", "b"],
    "logit_bias": {"5": -100},
    "stop_token_ids": [9],
    "seed": -5,
    "user": "u",
    "metadata": {"a": "b"},
    "ignore_eos": True,
    "priority": 3,
    "timing": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
SAMPLES: list[tuple[type[Any], Json]] = [
    (CompletionBody, {"prompt": "hello", "logprobs": 3, "echo": True, **SHARED}),
    (CompletionBody, {"prompt": [[1, 2], [3]], "best_of": 3}),
    (CompletionBody, {"prompt": ["a", "b"], "guided_json": SCHEMA}),
    (CompletionBody, {"prompt": [1, 2, 3], "guided_choice": ["yes", "no"]}),
    (CompletionBody, {"prompt": "x", "guided_regex": "[a-z]+", "response_format": None}),
    (ChatBody, {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, **SHARED}),
    (
        ChatBody,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "5", "tool_call_id": "c"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "chat_template_kwargs": {"x": [1, {"y": None}]},
        },
    ),
    (
        ChatBody,
        {
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}],
            "continue_final_message": True,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        },
    ),
    (TokenizeTextBody, {"prompt": "hello", "return_token_strs": True}),
    (TokenizeChatBody, {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}),
    (DetokenizeBody, {"tokens": [1, 2, 3]}),
]
Input = tuple[type[Any], bytes]


def read(given: Input) -> None:
    kind, body = given
    data = parse_json_object(body)
    if kind in (CompletionBody, ChatBody):
        parsed, _ = parse_known(kind, data)
        assert parsed.num_candidates >= 1
        assert parsed.structure is None or parsed.structure.grammar.source
    else:
        parse_body(kind, data)


def fuzzed_bodies(count: int, seed: int) -> Iterator[Input]:
    rng = random.Random(seed)
    encoded = [json.dumps(data).encode() for _, data in SAMPLES]
    for _ in range(count):
        number, how = rng.randrange(len(SAMPLES)), rng.random()
        kind, data = SAMPLES[number]
        if how < 0.5:
            yield kind, damaged(rng, encoded[number])
        elif how < 0.9:
            yield kind, json.dumps(with_one_hostile(rng, data)).encode()
        else:
            yield kind, rng.randbytes(rng.randrange(200))


def test_the_samples_are_right() -> None:
    """So that what is refused below is refused for what was done to it."""
    for kind, data in SAMPLES:
        read((kind, json.dumps(copy.deepcopy(data)).encode()))


@pytest.mark.parametrize(
    "count", [100_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_fuzzed_bodies_are_read_or_refused_and_nothing_else(count: int) -> None:
    num_all, num_refused = count_refused(read, fuzzed_bodies(count, seed=22), (InvalidRequestError,))
    assert num_all == count
    assert 0.3 * count < num_refused < count


def test_bodies_that_are_parsed_beside_the_streams_stay_small_and_quick() -> None:
    """Up to the size that is parsed at once (64 KiB): nesting, many small values, long numbers and strings."""
    size = 64 * 1024 - 40
    fillings = ["[" * size, '{"a":' * (size // 5), "1," * (size // 2), '"",' * (size // 3), "{}," * (size // 3)]
    fillings += ["9" * size, "1e" + "9" * (size - 2), "-" * size, '"' + "\\ud83d" * (size // 6) + '"']
    fillings += ['"' + "\\u0041" * (size // 6) + '"', '"' + "x" * size + '"', "[]," * (size // 3)]
    bodies = [f'{{"prompt": {filling}' for filling in fillings]
    bodies += [f'{{"prompt": [{filling.rstrip(",")}]}}' for filling in fillings]
    bodies += [f'{{"prompt": "a", "metadata": {{"a": [{filling.rstrip(",")}]}}}}' for filling in fillings]
    bodies += ["{" + ",".join(f'"{i}":0' for i in range(size // 9)) + ',"prompt":"a"}']
    assert_small(read, [(CompletionBody, body.encode()) for body in bodies], (InvalidRequestError,))
