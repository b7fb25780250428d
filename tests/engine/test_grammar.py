"""Grammars against Python's `re` and `json`: no token that leads astray, no way barred, an end where there is one."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings, strategies as st
from llguidance import LLTokenizer
from twinpool.cluster.protocol.messages import Grammar
from twinpool.engine.grammar import GrammarError, Grammars, json_source
from twinpool.router.openai.tokenizer import ChatTokenizer

END = 2
LETTERS = "abc"


@pytest.fixture(scope="module")
def grammars(smollm2: Path) -> Grammars:
    return Grammars.load(smollm2)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> ChatTokenizer:
    return ChatTokenizer.load(smollm2)


def walk(grammars: Grammars, grammar: Grammar, rng: random.Random, max_tokens: int = 200) -> tuple[list[int], bool]:
    """Go at random along allowed tokens; return the output, and whether it came to an end."""
    matcher, output = grammars.matcher(grammar), list[int]()
    while len(output) < max_tokens:
        token = int(rng.choice(np.flatnonzero(matcher.allowed(output, [END]))))
        if token == END:
            return output, True
        output.append(token)
    return output, False


def patterns() -> st.SearchStrategy[str]:
    """Small regexes over three letters."""

    def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        repeated = st.builds("(?:{}){}".format, inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"]))
        return st.one_of(st.builds("{}{}".format, inner, inner), st.builds("(?:{}|{})".format, inner, inner), repeated)

    return st.recursive(st.sampled_from([*LETTERS, "[ab]", "[^c]b", "."]), combine, max_leaves=6)


@settings(max_examples=40, deadline=None)
@given(pattern=patterns(), seed=st.integers(0, 2**16))
def test_the_mask_holds_what_keeps_a_prefix_valid_and_a_way_to_every_next_letter(
    grammars: Grammars, tokenizer: ChatTokenizer, pattern: str, seed: int
) -> None:
    """`re` of the package regex, which knows partial matches, is the oracle."""
    rng, compiled = random.Random(seed), regex.compile(pattern)
    matcher, output, text = grammars.matcher(Grammar(kind="regex", source=pattern)), list[int](), ""
    for _ in range(6):
        mask = matcher.allowed(output, [END])
        assert mask[END] == (compiled.fullmatch(text) is not None), text
        mask[END] = False
        tokens = [int(token) for token in np.flatnonzero(mask)]
        decoded = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
        for shown in rng.sample(decoded, min(200, len(decoded))):
            if "\ufffd" not in shown:
                assert compiled.fullmatch(text + shown, partial=True), (text, shown)
        reachable = {shown[0] for shown in decoded}
        for letter in LETTERS:
            assert (letter in reachable) == (compiled.fullmatch(text + letter, partial=True) is not None), (
                text,
                letter,
            )
        ways = [i for i, shown in enumerate(decoded) if "\ufffd" not in shown]
        if not ways:
            return
        chosen = rng.choice(ways)
        output.append(tokens[chosen])
        text += decoded[chosen]


def test_a_matcher_that_begins_anywhere_says_what_one_says_that_was_there_all_along(grammars: Grammars) -> None:
    """So a COMPLETION worker, or a later attempt, goes on exactly."""
    grammar = Grammar(kind="json_schema", source='{"type":"object"}')
    output, _ = walk(grammars, grammar, random.Random(3), 40)
    all_along = grammars.matcher(grammar)
    for i in range(len(output)):
        fresh = grammars.matcher(grammar)
        assert np.array_equal(all_along.allowed(output[:i], [END]), fresh.allowed(output[:i], [END]))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "array", "items": {"enum": ["a", 'quote " and \\', "é€😀"]}, "minItems": 2, "maxItems": 4},
        {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": -3, "maximum": 12}, "s": {"type": "string"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    ],
)
def test_json_that_ended_parses(grammars: Grammars, tokenizer: ChatTokenizer, schema: dict[str, object]) -> None:
    grammar = Grammar(kind="json_schema", source=json_source(schema))
    ended = 0
    for seed in range(12):
        output, is_ended = walk(grammars, grammar, random.Random(seed))
        if is_ended:
            ended += 1
            value = json.loads(tokenizer.decode(output))
            assert isinstance(value, list if schema["type"] == "array" else dict)
            if "required" in schema:
                assert -3 <= value["n"] <= 12
                assert set(value) <= {"n", "s"}
    assert ended


def test_whitespace_between_json_tokens_is_bounded(grammars: Grammars, smollm2: Path) -> None:
    """A small model that may write spaces for ever does."""
    spaces = LLTokenizer(str(smollm2 / "tokenizer.json")).tokenize_str("{" + " " * 40)
    with pytest.raises(GrammarError):
        grammars.matcher(Grammar(kind="json_schema", source='{"type":"object"}')).allowed(spaces, [END])


def test_a_finished_grammar_leaves_only_the_end(grammars: Grammars, smollm2: Path) -> None:
    output = LLTokenizer(str(smollm2 / "tokenizer.json")).tokenize_str("yes")
    matcher = grammars.matcher(Grammar(kind="regex", source="yes"))
    assert np.flatnonzero(matcher.allowed(output, [0, END])).tolist() == [0, END]
    with pytest.raises(GrammarError, match="no token"):
        grammars.matcher(Grammar(kind="regex", source="yes")).allowed(output, [])


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "a(b", "unclosed group"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(a{1000}){1000}", "too many"),
        ("regex", "a{100000}", "too many"),
        ("regex", r"[^\s\S]", ""),
        ("json_schema", "[]", ""),
        ("json_schema", '{"type":"string","minLength":2,"maxLength":1}', ""),
        ("json_schema", '{"type":"integer","minimum":5,"maximum":3}', "Unsatisfiable"),
        ("json_schema", '{"$ref":"http://example.com/schema"}', "not present"),
        ("json_schema", '{"x-guidance":{"lenient":true},"not":{}}', "not"),
        ("lark", "start: nothing", "unknown name"),
    ],
)
def test_what_is_wrong_or_too_large_is_refused_in_one_short_line(
    grammars: Grammars, kind: str, source: str, reason: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars.matcher(Grammar.model_validate({"kind": kind, "source": source}))
    assert reason in caught.value.message
    assert len(caught.value.message) <= 200
    assert "\n" not in caught.value.message


KEYWORDS = (
    *("not", "if", "then", "else", "contains", "minContains", "uniqueItems", "propertyNames", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_that_would_not_be_obeyed_is_refused(grammars: Grammars, keyword: str) -> None:
    with pytest.raises(GrammarError, match=regex.escape(keyword)):
        grammars.matcher(Grammar(kind="json_schema", source=json_source({keyword: {}})))


def test_compiled_grammars_are_bounded(smollm2: Path) -> None:
    grammars = Grammars(LLTokenizer(str(smollm2 / "tokenizer.json")), max_compiled=3)
    for i in range(10):
        grammars.matcher(Grammar(kind="regex", source=f"a{{{i}}}b"))
    assert len(grammars) == 3


def test_library_and_endpoint_agree_on_the_bytes_of_every_token(smollm2: Path, tokenizer: ChatTokenizer) -> None:
    library = LLTokenizer(str(smollm2 / "tokenizer.json"))
    wrong = [
        token
        for token in range(library.vocab_size)
        if not tokenizer.is_special(token) and library.decode_bytes([token]) != tokenizer.token_bytes(token)
    ]
    assert wrong == []


def test_states_that_other_outputs_used_up_are_not_missed(smollm2: Path) -> None:
    """What may come next is a function of grammar and output alone: it is no matter what a process did before."""
    grammar = Grammar(kind="regex", source="(.|\n)*a(.|\n){18}")
    grammars = Grammars(LLTokenizer(str(smollm2 / "tokenizer.json")), max_states=2000)
    for seed in range(10):
        output, _ = walk(grammars, grammar, random.Random(seed), max_tokens=10)
        assert output
