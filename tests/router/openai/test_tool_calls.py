"""Calls found in text, however it is cut into pieces, and the grammar that enforces them."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from twinpool.cluster.protocol.messages import Grammar
from twinpool.engine.grammar import Grammars
from twinpool.router.openai.tokenizer import ChatTokenizer
from twinpool.router.openai.tool_calls import (
    CallParser,
    ExpectedCalls,
    Found,
    ToolFormat,
    calls_grammar,
    find_tool_format,
)

NAMES = frozenset({"f", "g"})
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
BAD = "<tool_call>\n{broken\n</tool_call>"
INSIDE = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'
Calls = list[tuple[str, str]]

HERMES: list[tuple[str, str, Calls]] = [
    (F, "", [("f", '{"a": 1}')]),
    (f"Let me see.\n\n{F}", "Let me see.", [("f", '{"a": 1}')]),
    (f"{F}\n{G}\n", "", [("f", '{"a": 1}'), ("g", "{}")]),
    (f"{F} and then", "and then", [("f", '{"a": 1}')]),
    (f"a {BAD} b {G}", f"a {BAD} b", [("g", "{}")]),
    (INSIDE, "", [("f", '{"a": "</tool_call>"}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("f", '{"a": 2}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),  # the model forgot to close it
]
HERMES_TEXTS = [
    "plain text",
    '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": []}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
    "<tool_call>5</tool_call>",
    '<tool_call>{"name": "f", "argum',
    "1 < 2 <tool",
    "ends in space \n",
    "<tool_call><tool_call>",
]
LLAMA: list[tuple[str, str, Calls]] = [
    ('{"name": "f", "parameters": {"a": "}{"}}', "", [("f", '{"a": "}{"}')]),
    (
        '\n {"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": {}}}\n',
        "",
        [("f", "{}"), ("g", '{"b": {}}')],
    ),
    ('{"name": "f", "parameters": {}} done', " done", [("f", "{}")]),
]
LLAMA_TEXTS = [
    "plain {text}",
    '{"name": "h", "parameters": {}} x',
    '{"answer": 42}',
    '{"name": "f", "para',
    'say {"name": "f", "parameters": {}}',
]
CASES = [
    *(("hermes", *case) for case in HERMES),
    *(("hermes", text, text, []) for text in HERMES_TEXTS),
    *(("llama3_json", *case) for case in LLAMA),
    *(("llama3_json", text, text, []) for text in LLAMA_TEXTS),
]


def parser(tool_format: ToolFormat) -> CallParser:
    return ExpectedCalls(tool_format, NAMES).parser()


def run(tool_format: ToolFormat, pieces: list[str]) -> Found:
    calls, total = parser(tool_format), Found()
    for found in (*(calls.push(piece) for piece in pieces), calls.finish()):
        total.text += found.text
        total.calls += found.calls
    return total


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_calls_are_found_wherever_the_text_is_cut(
    tool_format: ToolFormat, text: str, content: str, calls: Calls
) -> None:
    rng = random.Random(1)
    cuts = [[text], list(text)]
    for _ in range(20):
        places = sorted(rng.sample(range(len(text) + 1), 3))
        cuts.append([text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)])
    for pieces in cuts:
        found = run(tool_format, pieces)
        assert (found.text, [(call.name, call.arguments) for call in found.calls]) == (content, calls)
        assert len({call.id for call in found.calls}) == len(calls)


@given(text=st.text(alphabet='<tool_call>/{}"\\ \n:a', max_size=60))
def test_text_without_a_call_comes_back_as_it_was(text: str) -> None:
    """Nobody writes a call of f by chance."""
    for tool_format in ("hermes", "llama3_json"):
        found = run(tool_format, list(text))
        assert (found.text, found.calls) == (text, [])


def test_no_more_is_held_back_than_may_belong_to_a_call() -> None:
    calls = parser("hermes")
    assert calls.push("Hello < ").text == "Hello <"
    assert calls.push("world <tool").text == " world"
    assert calls.push("box").text == " <toolbox"
    assert calls.push(f" {F[:-1]}") == Found()
    assert len(calls.push(">").calls) == 1


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    """JSON can write it, UTF-8 cannot: the answer must."""
    (call,) = run("hermes", ['<tool_call>{"name": "f", "arguments": {"a": "\\ud800é"}}</tool_call>']).calls
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {"a": "\ud800é"}


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ('{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}', "llama3_json"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}", None),
        ("{% if tools %}<tool_call><function=name>{% endif %}", None),
    ],
)
def test_the_format_is_known_by_the_template(template: str, tool_format: ToolFormat | None) -> None:
    assert find_tool_format(template) == tool_format


@pytest.mark.parametrize("is_single", [True, False])
@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json"])
def test_what_the_grammar_enforces_is_found(
    model_folder: Path, tokenizer: ChatTokenizer, tool_format: ToolFormat, is_single: bool
) -> None:
    """Random ways through the grammar are calls, nothing else, and their arguments obey the schema."""
    expected = ExpectedCalls(tool_format, NAMES, is_single)
    schema = {"properties": {"n": {"type": "integer", "minimum": 1, "maximum": 5}}, "required": ["n"]}
    source = calls_grammar([("f", schema | {"additionalProperties": False}), ("g", {"maxProperties": 0})], expected)
    grammars, end = Grammars.load(model_folder), next(iter(tokenizer.eos_ids))
    for seed in range(6):
        rng, output = random.Random(seed), list[int]()
        matcher = grammars.matcher(Grammar(kind="lark", source=source))
        while True:
            mask = matcher.allowed(output, [end])
            if mask[end] and (mask.sum() == 1 or rng.random() < 0.5):
                break
            mask[end] = False
            output.append(int(rng.choice(np.flatnonzero(mask))))
        found = run(tool_format, [tokenizer.decode(output)])
        assert found.text == ""
        assert len(found.calls) == 1 if is_single else found.calls
        for call in found.calls:
            arguments = json.loads(call.arguments)
            assert 1 <= arguments["n"] <= 5 if call.name == "f" else arguments == {}
