"""Tools with the real model, whose own template knows none: an operator's template gives it Hermes' format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster
from openai import OpenAI

TEMPLATE = Path(__file__).parents[1] / "support" / "hermes.jinja"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}}
ASK: Any = [{"role": "user", "content": "How is the weather in Rome for the next 3 days?"}]


@pytest.fixture(scope="module")
def cluster(smollm2: Path) -> Iterator[LiveCluster]:
    engine = {"dtype": "float32", "kv_cache_bytes": 1 << 28}
    pools = {"prompt": {"engine": engine}, "completion": {"engine": engine}}
    router = {"chat_template": str(TEMPLATE)}
    with LiveCluster(smollm2, {**pools, "router": router, "served_model_name": "smollm2"}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LiveCluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("choice", "temperature"),
    [
        pytest.param("required", 1.0, marks=pytest.mark.slow),
        ({"type": "function", "function": {"name": "weather"}}, 0.0),
    ],
)
def test_a_call_that_must_be_made_is_made(client: OpenAI, choice: Any, temperature: float) -> None:
    """Streamed as well, where the client puts the calls together."""
    fields: Any = {"model": "smollm2", "messages": ASK, "tools": [WEATHER, TIME], "max_tokens": 80, "seed": 5}
    fields |= {"tool_choice": choice, "temperature": temperature, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(arguments) == {"city", "days"}
        assert arguments["days"] <= 9
    else:
        assert choice == "required"
        assert arguments == {}
    streamed = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **fields)]
    calls = [call for chunk in streamed for call in chunk.delta.tool_calls or []]
    assert [(c.index, c.function.name, c.function.arguments) for c in calls if c.function] == [
        (0, call.function.name, call.function.arguments)
    ]
    assert "".join(chunk.delta.content or "" for chunk in streamed) == ""
    assert [chunk.finish_reason for chunk in streamed if chunk.finish_reason] == ["tool_calls"]


def test_the_model_may_answer_and_go_on_from_results(client: OpenAI) -> None:
    """Parts as a tool's content made another server fail."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny, 25 degrees"}]}
    messages: Any = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, tools=[WEATHER], max_tokens=12, temperature=0
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_the_models_own_template_refuses_tools(chat_cluster: LiveCluster) -> None:
    body = {"messages": ASK, "tools": [WEATHER], "max_tokens": 4}
    response = chat_cluster.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_value"
