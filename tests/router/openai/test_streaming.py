"""The shape of a stream that clients depend on, for both endpoints; and that no long prompt holds the router up."""

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from twinpool.router.openai.tokenizer import ChatTokenizer

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
}
LOGPROBS: dict[str, dict[str, Any]] = {"chat": {"logprobs": True}, "completions": {"logprobs": 1}}
TEXT = "żółć 🎉\u2028\r\n\tdata: [DONE]\n\nend"


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("has_logprobs", [False, True])
@pytest.mark.parametrize("wants_usage", [False, True])
@pytest.mark.parametrize("text", [TEXT, ""])
def test_the_order_of_a_stream(
    call: Any, backend: Any, say: Callable[..., Any], kind: str, has_logprobs: bool, wants_usage: bool, text: str
) -> None:
    """Roles, contents, one finish a choice, usage, [DONE]; one head on all; nothing but data lines, one LF each."""
    backend.script = lambda request: say(text)
    body = {**PROMPTS[kind], "n": 2, "stream": True, **(LOGPROBS[kind] if has_logprobs else {})}
    if wants_usage:
        body["stream_options"] = {"include_usage": True}
    response = call("POST", PATHS[kind], json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert b"\r" not in response.content
    *events, done, end = response.content.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") and len(event.splitlines()) == 1 for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    if wants_usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 2 * (len(say(text)) - 1)
    assert all(("usage" in chunk) == wants_usage and not chunk.get("usage") for chunk in chunks)
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        check_choice(choices, kind, text)


def check_choice(choices: list[Any], kind: str, text: str) -> None:
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert choices[-1]["finish_reason"] == "stop"
    if kind == "completions":
        assert "".join(choice["text"] for choice in choices) == text
        return
    first, *contents, last = [choice["delta"] for choice in choices]
    assert (first, last) == ({"role": "assistant", "content": ""}, {})
    assert "".join(delta["content"] for delta in contents) == text


def test_a_prompt_that_is_long_to_tokenise_holds_up_nobody(
    server_url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is tokenised, health and other requests are answered."""
    encode = tokenizer.encode
    begun, go_on = threading.Event(), threading.Event()

    def slow(text: str, *arguments: Any, **keywords: Any) -> list[int]:
        if len(text) > 100_000:
            begun.set()
            assert go_on.wait(20)
            return [1]
        return encode(text, *arguments, **keywords)

    monkeypatch.setattr(tokenizer, "encode", slow)
    body = {"prompt": "x" * 1_000_000, "max_tokens": 1}
    asking = threading.Thread(target=httpx.post, args=(server_url + PATHS["completions"],), kwargs={"json": body})
    asking.start()
    assert begun.wait(20)
    assert httpx.get(f"{server_url}/health/live", timeout=10).status_code == 200
    assert httpx.post(server_url + PATHS["completions"], json={"prompt": "a"}, timeout=10).status_code == 200
    go_on.set()
    asking.join(20)
    assert not asking.is_alive()
