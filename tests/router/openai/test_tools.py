"""Tools at the endpoint: what goes into the prompt, what is enforced, what comes back, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from twinpool.cluster.protocol.messages import SampledToken
from twinpool.router.app import create_app
from twinpool.router.generation import TokensSent
from twinpool.router.openai.tokenizer import ChatSettings, ChatTokenizer

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}  # no parameters: other routers answered 422
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
TEMPLATE = Path(__file__).parents[2] / "support" / "hermes.jinja"

Events = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def hermes(model_folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(model_folder, ChatSettings(TEMPLATE))


@pytest.fixture
def client(backend: Any, hermes: ChatTokenizer) -> TestClient:
    return TestClient(create_app(backend, hermes, "tiny", keep_alive_s=0.02))


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(CHAT, json={"messages": HI, "tools": [WEATHER, TIME], **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def deltas(client: TestClient, events_of: Events, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(CHAT, json={"messages": HI, "tools": [WEATHER, TIME], "stream": True, **fields})
    return [chunk["choices"][0] for chunk in events_of(response.text)]


def says(backend: Any, say: Any, text: str, reason: str = "stop") -> None:
    backend.script = lambda request: say(text, reason)


def prompt_of(backend: Any, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(backend.requests[-1].token_ids)


def test_tools_go_into_the_prompt(client: TestClient, backend: Any, hermes: ChatTokenizer) -> None:
    assert ask(client)["finish_reason"] == "stop"
    prompt = prompt_of(backend, hermes)
    assert json.dumps(WEATHER["function"]) in prompt
    assert '"name": "time"' in prompt
    assert backend.requests[-1].sampling.grammar is None
    ask(client, tool_choice="none")
    assert "weather" not in prompt_of(backend, hermes)


def test_a_call_comes_back_as_one(client: TestClient, backend: Any, say: Any) -> None:
    says(backend, say, CALL)
    choice = ask(client)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Łódź"}'})
    assert call["id"].startswith("call_")


def test_text_beside_calls_stays_content(client: TestClient, backend: Any, say: Any) -> None:
    says(backend, say, f"One moment.\n{CALL}\n{CALL}")
    message = ask(client)["message"]
    assert message["content"] == "One moment."
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("text", [CALL, f"One moment.\n{CALL}\n{CALL}", "no call", f"{CALL[:-1]}!", "<tool_call>{"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_says_what_a_whole_answer_says(
    client: TestClient, backend: Any, say: Any, events_of: Events, text: str, reason: str
) -> None:
    says(backend, say, text, reason)
    whole, chunks = ask(client), deltas(client, events_of)
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert content == (whole["message"]["content"] or "")
    assert [call["index"] for call in calls] == list(range(len(calls)))
    expected = [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == expected
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [whole["finish_reason"]]
    assert whole["finish_reason"] == ("tool_calls" if expected and reason == "stop" else reason)


def test_no_markup_is_streamed_before_a_call(client: TestClient, backend: Any, say: Any, events_of: Events) -> None:
    says(backend, say, CALL)
    assert "<" not in "".join(c["delta"].get("content") or "" for c in deltas(client, events_of))


def test_without_parallel_calls_the_first_one_ends_the_answer(client: TestClient, backend: Any, say: Any) -> None:
    says(backend, say, f"{CALL}\n{CALL} and more")
    choice = ask(client, parallel_tool_calls=False)
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["weather", "time"]), ({"type": "function", "function": {"name": "time"}}, ["time"])],
)
def test_a_call_that_must_be_is_enforced(client: TestClient, backend: Any, choice: Any, names: list[str]) -> None:
    ask(client, tool_choice=choice)
    grammar = backend.requests[-1].sampling.grammar
    assert grammar.kind == "lark"
    for name in ("weather", "time"):
        assert (f'\\"name\\": \\"{name}\\"' in grammar.source) == (name in names)


def test_earlier_calls_and_results_go_into_the_prompt(client: TestClient, backend: Any, hermes: ChatTokenizer) -> None:
    """Content may be null beside calls, and that of a tool a list of parts."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]}
    for content in ({"content": None}, {}, {"content": "Well"}):
        messages = [*HI, {"role": "assistant", "tool_calls": [call], **content}, result]
        ask(client, messages=messages)
        prompt = prompt_of(backend, hermes)
        assert '"arguments": {"city": "Rome"}' in prompt
        assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_a_template_without_a_word_for_calls_gets_them_as_text(backend: Any, tokenizer: ChatTokenizer) -> None:
    """So nothing of a conversation is lost without a word."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    messages = [*HI, {"role": "assistant", "content": "Well", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    plain = TestClient(create_app(backend, tokenizer, "tiny"))
    assert plain.post(CHAT, json={"messages": messages}).status_code == 200
    assert 'Well\n<tool_call>\n{"name": "weather", "arguments": {}}' in prompt_of(backend, tokenizer)


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "time"}}])
def test_a_template_that_knows_no_tools_refuses_them(backend: Any, tokenizer: ChatTokenizer, choice: Any) -> None:
    plain = TestClient(create_app(backend, tokenizer, "tiny"))
    body = {"messages": HI, "tools": [TIME], "tool_choice": choice}
    error = plain.post(CHAT, json=body).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_value")
    assert plain.post(CHAT, json=body | {"tool_choice": "none"}).status_code == 200
    assert plain.post("/tokenize", json=body).status_code == 400


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [TIME] * 129}, "tools"),
        (function(name="no spaces"), "tools[0].function.name"),
        (function(name="x" * 65), "tools[0].function.name"),
        (function(parameters=[]), "tools[0].function.parameters"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "tool_choice": "required"}, "guided_regex"),
        ({**function(parameters={"type": "object", "not": {}}), "tool_choice": "required"}, "tools"),
        ({**function(parameters={"description": "x" * 13000}), "tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": 1}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field(
    client: TestClient, backend: Any, fields: dict[str, Any], param: str
) -> None:
    response = client.post(CHAT, json={"messages": HI, "tools": [WEATHER, TIME], **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert backend.requests == []


def test_markers_among_the_special_tokens_are_seen(backend: Any, say: Any, model_folder: Path, tmp_path: Path) -> None:
    """Some vocabularies have the tags as special tokens, which answers do not show."""
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    size = max(token["id"] for token in data["added_tokens"]) + 1
    blank = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for i, tag in enumerate(("<tool_call>", "</tool_call>")):
        data["added_tokens"].append({"id": size + i, "content": tag, **blank})
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": size + 2}))
    tokenizer = ChatTokenizer.load(tmp_path, ChatSettings(TEMPLATE))
    ids = [size, *tokenizer.encode('{"name": "time"}'), size + 1]
    events = [TokensSent(i, (SampledToken(token=token),)) for i, token in enumerate(ids)]
    backend.script = lambda request: [*events, say("")[-1]]
    choice = ask(TestClient(create_app(backend, tokenizer, "tiny")))
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
    assert choice["message"]["content"] is None
