"""Bad input: always the OpenAI error body with the right status, never a request to a worker."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from twinpool.cluster.protocol.errors import InvalidRequestError
from twinpool.router.openai.http import parse_aside

USER = [{"role": "user", "content": "hi"}]
HALF = [{"role": "assistant", "content": "Hel"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(response.content) < 2048
    return body["error"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": 5}, "prompt", "invalid_type"),
        ({"prompt": {}}, "prompt", "invalid_type"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["a", [1]]}, "prompt", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": [1, True]}, "prompt", "invalid_type"),
        ({"prompt": [1.5]}, "prompt", "invalid_type"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [10**18]}, "prompt", "invalid_value"),
        ({"prompt": [265]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"model": 5}, "model", "invalid_type"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.0}, "max_tokens", "invalid_type"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"min_p": -1}, "min_p", "invalid_value"),
        ({"top_k": 0.01}, "top_k", "invalid_type"),
        ({"top_k": "5"}, "top_k", "invalid_type"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 5_000_000}, "n", "invalid_value"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"n": 2, "best_of": 1}, "best_of", "invalid_value"),
        ({"best_of": 17}, "best_of", "invalid_value"),
        ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
        ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens", "invalid_type"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output", "invalid_type"),
        ({"prompt_cache_key": 5}, "prompt_cache_key", "invalid_type"),
        ({"priority": 2**63}, "priority", "invalid_value"),
        ({"priority": "high"}, "priority", "invalid_type"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": -1}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"logit_bias": {"abc": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"265": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["x", ""]}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop", "invalid_type"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
        ({"seed": 1.5}, "seed", "invalid_type"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": 5}, "stream_options", "invalid_type"),
        ({"suffix": "x"}, "suffix", "unsupported_value"),
        ({"guided_grammar": "root ::= a"}, "guided_grammar", "unsupported_value"),
        ({"structured_outputs": {"regex": "a*"}}, "structured_outputs", "unsupported_value"),
        ({"user": 5}, "user", "invalid_type"),
    ],
)
def test_completions_refuses(call: Any, backend: Any, fields: dict[str, Any], param: str, code: str) -> None:
    """One wrong field: 400 that names it."""
    error = error_of(call("POST", COMPLETIONS, json={"model": "tiny", "prompt": "hi"} | fields), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert backend.requests == []


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": "x"}, "messages", "invalid_type"),
        ({"messages": [5]}, "messages[0]", "invalid_type"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [*USER, {"role": "user", "content": 5}]}, "messages[1].content", "invalid_type"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "missing_required_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "unsupported_value",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": 1}]},
            "messages[0].tool_calls",
            "invalid_type",
        ),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"logprobs": 1}, "logprobs", "invalid_type"),
        ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"tools": []}, "tools", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_value"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"chat_template": "x"}, "chat_template", "unsupported_value"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
        (
            {"messages": [*USER, *HALF], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_value",
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "invalid_type"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"x": "a" * 16_400}}, "chat_template_kwargs", "invalid_value"),
    ],
)
def test_chat_refuses(call: Any, backend: Any, fields: dict[str, Any], param: str, code: str) -> None:
    """One wrong field: 400 that names it."""
    error = error_of(call("POST", CHAT, json={"model": "tiny", "messages": USER} | fields), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert backend.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "hi"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": -Infinity}',
        b'{"prompt": "hi", "temperature": 1e400}',
        b'{"prompt": "hi", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "hi", "seed": ' + b"1" * 10_000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "hi", "stop": ["\\uDFFF"]}',
        b"[]",
        b'"hi"',
        b"null",
        b'{"prompt": "hi", "x": [' + b"1," * 1_000_001 + b"1]}",
        b'{"prompt": "hi", "x": [' + b'"",' * 1_000_001 + b"1]}",
    ],
)
def test_malformed_bodies(call: Any, backend: Any, body: bytes) -> None:
    """Not strict JSON, or no object: 400, and the next request is served."""
    headers = {"content-type": "application/json"}
    error_of(call("POST", COMPLETIONS, content=body, headers=headers), 400)
    assert backend.requests == []
    assert call("POST", COMPLETIONS, json={"prompt": "hi"}).status_code == 200


def test_a_text_may_hold_any_number_of_commas(call: Any, backend: Any) -> None:
    """Only values are bounded: what stands in strings, behind escaped quotes as well, is text."""
    backend.max_model_len = 4_000_000
    text = json.dumps({"prompt": '\\",[{' * 400_000 + "\\\\"})
    headers = {"content-type": "application/json"}
    assert call("POST", COMPLETIONS, content=text, headers=headers).status_code == 200
    assert len(backend.requests[0].token_ids) == 5 * 400_000 + 2


def test_long_bodies_are_parsed_beside_the_loop() -> None:
    """What takes longer than a millisecond must not hold up streams: it runs in another thread."""
    threads = []

    async def parse(num_characters: int) -> None:
        body = json.dumps({"prompt": "x" * num_characters}).encode()
        threads.append(await parse_aside(body, lambda data: threading.current_thread()))

    asyncio.run(parse(10))
    asyncio.run(parse(1_000_000))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_unknown_fields_are_counted(call: Any) -> None:
    """By endpoint alone: their names are the clients' own."""
    call("POST", COMPLETIONS, json={"prompt": "hi", "brand_new": 1, "newer": None, "suffix": ""})
    page = call("GET", "/metrics").text
    assert 'twinpool_unknown_fields_total{endpoint="completions"} 2.0' in page
    assert "brand_new" not in page


def test_paired_surrogates_are_a_character(call: Any, backend: Any, tokenizer: Any) -> None:
    """An escaped emoji is legal JSON."""
    headers = {"content-type": "application/json"}
    response = call("POST", COMPLETIONS, content=b'{"prompt": "\\ud83d\\ude00"}', headers=headers)
    assert response.status_code == 200
    assert tokenizer.decode(backend.requests[0].token_ids) == "😀"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(call: Any, stream: bool) -> None:
    """404 with the official code, streamed or not."""
    error = error_of(call("POST", CHAT, json={"model": "nope", "messages": USER, "stream": stream}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "nope" not in error["message"]
    error_of(call("GET", "/v1/models/nope"), 404)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_beyond_the_context(call: Any, backend: Any, stream: bool) -> None:
    """400 names the limit, the prompt's tokens and max_tokens; the last fitting request is served."""
    backend.max_model_len = 20
    body: dict[str, Any] = {"prompt": [5] * 8, "max_tokens": 13, "stream": stream}
    error = error_of(call("POST", COMPLETIONS, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert {"20", "8", "13"} <= set(error["message"].replace(",", "").replace(".", "").split())
    assert call("POST", COMPLETIONS, json=body | {"max_tokens": 12}).status_code == 200
    long = [{"role": "user", "content": "x" * 50}]
    error = error_of(call("POST", CHAT, json={"messages": long, "stream": stream}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_other_media_types(call: Any, content_type: str | None) -> None:
    """415 in the envelope."""
    headers = {} if content_type is None else {"content-type": content_type}
    error_of(call("POST", COMPLETIONS, content=b'{"prompt": "hi"}', headers=headers), 415)


def test_charset_parameter_is_fine(call: Any) -> None:
    """The header may name its charset."""
    headers = {"content-type": "application/json; charset=utf-8"}
    assert call("POST", COMPLETIONS, content=b'{"prompt": "hi"}', headers=headers).status_code == 200


def test_too_large_body(call: Any) -> None:
    """One byte above 32 MiB is 413, a legal body of that size is read."""
    filler = b'{"prompt": "hi", "x": "' + b"a" * (32 * 1024 * 1024 - 25) + b'"}'
    headers = {"content-type": "application/json"}
    assert len(filler) == 32 * 1024 * 1024
    assert call("POST", COMPLETIONS, content=filler, headers=headers).status_code == 200
    error_of(call("POST", COMPLETIONS, content=filler + b" ", headers=headers), 413)


def test_unknown_path_and_method(call: Any) -> None:
    """404 and 405 (with Allow) in the envelope; no redirect to another slash."""
    error_of(call("GET", "/nope"), 404)
    error_of(call("POST", COMPLETIONS + "/", json={}), 404)
    response = call("GET", COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_template_refusal(call: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the template says reaches the client as a 400."""

    def refuse(*_: Any) -> list[int]:
        raise InvalidRequestError("Conversation roles must alternate", param="messages")

    monkeypatch.setattr(tokenizer, "encode_chat", refuse)
    error = error_of(call("POST", CHAT, json={"messages": USER}), 400)
    assert "alternate" in error["message"]


def test_null_means_absent(call: Any, backend: Any) -> None:
    """null in any optional field is the default; unknown and empty harmless fields are ignored."""
    fields = ["max_tokens", "stream", "stop", "seed", "logit_bias", "stream_options", "echo", "n", "suffix", "user"]
    body: dict[str, Any] = {"prompt": "hi", "min_tokens": 0, "brand_new": {"x": 1}, "suffix": ""} | dict.fromkeys(
        fields
    )
    assert call("POST", COMPLETIONS, json=body).status_code == 200
    assert backend.requests[0].sampling.max_tokens == 16
