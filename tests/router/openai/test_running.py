"""Requests that end early: failures before and after the first token, clients that leave, silence in between."""

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from twinpool.router.generation import FailureCode, GenerationFailed

USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAIT_S = 10


def count_client_left(page: str) -> float:
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return sum(s.value for s in samples if s.labels.get("outcome") == "client_left" and s.name.endswith("_total"))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("no_worker", 503),
        ("queue_full", 503),
        ("timeout", 504),
        ("worker_failed", 502),
        ("too_long", 400),
        ("grammar_failed", 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token(call: Any, backend: Any, code: FailureCode, status: int, stream: bool) -> None:
    """A real status, streamed or not, with Retry-After where trying again helps."""
    backend.script = lambda request: [GenerationFailed(code, "Said by the dispatcher.")]
    response = call("POST", CHAT, json={"messages": USER, "stream": stream})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["message"] == "Said by the dispatcher."
    assert error["code"] == ("context_length_exceeded" if code == "too_long" else code)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert 'outcome="' + error["code"] in call("GET", "/metrics").text


def test_failure_after_the_first_token(events_of: Any, call: Any, backend: Any, say: Callable[..., Any]) -> None:
    """Streamed: an error event, [DONE], and no finish reason; whole: the true status."""
    backend.script = lambda request: [*say("ab")[:-1], GenerationFailed("worker_failed", "It died.")]
    *chunks, last = events_of(call("POST", CHAT, json={"messages": USER, "stream": True}).text)
    assert last["error"] == {"message": "It died.", "type": "server_error", "param": None, "code": "worker_failed"}
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)
    assert call("POST", CHAT, json={"messages": USER}).status_code == 502


@pytest.mark.parametrize("stream", [False, True])
def test_bug_of_ours(events_of: Any, call: Any, backend: Any, say: Callable[..., Any], stream: bool) -> None:
    """An unforeseen exception is a 500 without details before the first token, an error event afterwards."""
    backend.script = lambda request: [RuntimeError("secret detail")]
    response = call("POST", CHAT, json={"messages": USER, "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"]
    backend.script = lambda request: [say("a")[0], RuntimeError("secret detail")]
    response = call("POST", CHAT, json={"messages": USER, "stream": True})
    assert events_of(response.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_while_nothing_flows(
    server_url: str, backend: Any, new_gate: Any, say: Callable[..., Any], stream: bool
) -> None:
    """In the queue or in prefill: closing the connection closes the backend's iterator."""
    backend.script = lambda request: [new_gate(), *say("never")]
    body = json.dumps({"prompt": "hi", "stream": stream}).encode()
    host, port = server_url.removeprefix("http://").split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert backend.waiting.wait(WAIT_S)
        assert not backend.closed.is_set()
    assert backend.closed.wait(WAIT_S)
    assert httpx.get(f"{server_url}/health/live").status_code == 200
    deadline_s = time.monotonic() + WAIT_S
    while count_client_left(httpx.get(f"{server_url}/metrics").text) != 1:
        assert time.monotonic() < deadline_s


def test_client_leaves_in_mid_stream(server_url: str, backend: Any, new_gate: Any, say: Callable[..., Any]) -> None:
    """After some tokens, while the next one is awaited."""
    backend.script = lambda request: [*say("abc")[:-1], new_gate()]
    with httpx.stream("POST", server_url + CHAT, json={"messages": USER, "stream": True}, timeout=WAIT_S) as response:
        lines = response.iter_lines()  # kept: an iterator that is dropped closes the connection
        assert any('"content":"c"' in line for line in lines)
        assert not backend.closed.is_set()
    assert backend.closed.wait(WAIT_S)


def test_keep_alive(events_of: Any, server_url: str, backend: Any, new_gate: Any, say: Callable[..., Any]) -> None:
    """Comments flow before the first token and between tokens; a failure then comes as an event."""
    gates = [new_gate(), new_gate()]
    backend.script = lambda request: [
        gates[0],
        *say("ab")[:-1],
        gates[1],
        GenerationFailed("worker_failed", "It died."),
    ]
    lines: list[str] = []
    with httpx.stream("POST", server_url + CHAT, json={"messages": USER, "stream": True}, timeout=WAIT_S) as response:
        assert response.status_code == 200
        num_comments = 0
        for line in response.iter_lines():
            lines.append(line)
            num_comments += line.startswith(":")
            if num_comments == 3:
                gates[0].open()
            if num_comments == 6:
                gates[1].open()
    *chunks, last = events_of("\n".join(lines) + "\n")
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "ab"
    assert last["error"]["code"] == "worker_failed"
