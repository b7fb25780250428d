"""`response_format` and the guided fields: which grammar goes to the workers, and what never gets that far."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from llguidance import LLMatcher, LLTokenizer
from twinpool.cluster.protocol.errors import InvalidRequestError
from twinpool.cluster.protocol.messages import MAX_GRAMMAR_CHARACTERS, Grammar
from twinpool.engine.grammar import Grammars
from twinpool.router.app import create_app
from twinpool.router.openai.structured import GrammarCheck, structured
from twinpool.router.openai.tokenizer import ChatSettings, ChatTokenizer

Call = Callable[..., httpx.Response]
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
HI = [{"role": "user", "content": "hi"}]


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def ask(call: Call, fields: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    prompt = {"messages": HI} if "chat" in path else {"prompt": "hi"}
    return call("POST", path, json={**prompt, **fields})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_regex": None}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type":"object"}')),
        (schema_format(PERSON), ("json_schema", json.dumps(PERSON, separators=(",", ":")))),
        ({"guided_json": PERSON}, ("json_schema", json.dumps(PERSON, separators=(",", ":")))),
        ({"guided_json": json.dumps(PERSON)}, ("json_schema", json.dumps(PERSON, separators=(",", ":")))),
        ({"guided_regex": "[0-9]{3}"}, ("regex", "[0-9]{3}")),
        ({"guided_choice": ["yes"]}, ("lark", 'start: "yes"')),
        ({"guided_choice": ['say "no"\n', "é"]}, ("lark", 'start: "say \\"no\\"\\n" | "é"')),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, ("regex", "a")),
    ],
)
def test_the_grammar_goes_to_the_workers(
    call: Call, backend: Any, path: str, fields: dict[str, Any], grammar: tuple[str, str] | None
) -> None:
    response = ask(call, fields, path)
    assert response.status_code == 200, response.text
    sent = backend.requests[-1].sampling.grammar
    assert sent == (None if grammar is None else Grammar.model_validate({"kind": grammar[0], "source": grammar[1]}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (schema_format(5), "response_format.json_schema.schema"),
        (schema_format({"type": "secret-thing"}), "response_format"),
        (schema_format({"type": "array", "uniqueItems": True}), "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": r"(a)\1"}, "guided_regex"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
    ],
)
def test_what_cannot_be_obeyed_is_a_400_that_names_the_field(
    call: Call, backend: Any, fields: dict[str, Any], param: str
) -> None:
    """The vLLM server answered a response_format without its schema with 500."""
    for extra in ({}, {"stream": True}):
        response = ask(call, fields | extra)
        error = response.json()["error"]
        assert response.status_code == 400, response.text
        assert error["param"] == param
        assert len(error["message"]) < 400
        assert "aaaaaa" not in error["message"]
    assert backend.requests == []


def test_deeply_nested_schemas_are_refused(call: Call) -> None:
    """serde's limit is 128 levels."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(90):
        schema = {"type": "object", "properties": {"a": schema}}
    assert ask(call, {"guided_json": schema}).status_code == 400


def test_a_grammar_keeps_the_ends_that_ignore_eos_would_drop(
    call: Call, backend: Any, tokenizer: ChatTokenizer
) -> None:
    ask(call, {"guided_regex": "a", "ignore_eos": True})
    assert set(tokenizer.eos_ids) <= set(backend.requests[-1].sampling.stop_token_ids)


def test_engines_that_know_no_grammar_refuse_it(backend: Any, model_folder: Any) -> None:
    tokenizer = ChatTokenizer.load(model_folder, ChatSettings(knows_grammars=False))
    app = create_app(backend, tokenizer, "tiny")
    response = TestClient(app).post("/v1/chat/completions", json={"messages": HI, "guided_regex": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_value"


def test_how_grammars_came_out_is_counted(call: Call) -> None:
    for source in ("ab", "ab", "("):
        ask(call, {"guided_regex": source})
    text = call("GET", "/metrics").text
    for outcome, count in (("compiled", 1), ("known", 1), ("refused", 1), ("timed_out", 0)):
        assert f'twinpool_grammars_total{{outcome="{outcome}"}} {count}.0' in text


class SlowGrammars(Grammars):
    """Compiles nothing before it is told to."""

    def __init__(self, model_folder: Path) -> None:
        super().__init__(LLTokenizer(str(model_folder / "tokenizer.json")))
        self.may_go_on = threading.Event()

    def compile(self, grammar: Grammar) -> LLMatcher:
        self.may_go_on.wait(30)
        return super().compile(grammar)


def test_a_compilation_that_takes_too_long_is_refused_and_holds_nobody_up(model_folder: Path) -> None:
    grammars, outcomes = SlowGrammars(model_folder), list[str]()

    async def ask_twice() -> None:
        check = GrammarCheck(grammars, outcomes.append, limit_s=0.01)
        with pytest.raises(InvalidRequestError, match="took longer"):
            await check.check(structured("guided_regex", "regex", "a"))
        grammars.may_go_on.set()
        await GrammarCheck(grammars, outcomes.append).check(structured("guided_regex", "regex", "b"))

    asyncio.run(ask_twice())
    assert outcomes == ["timed_out", "compiled"]
