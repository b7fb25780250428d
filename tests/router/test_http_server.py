"""Below the application: what is no HTTP, too large or too slow gets our error, and nobody else notices."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from twinpool.cluster.config import RouterSpec
from twinpool.router.app import Door, create_app
from twinpool.router.http_server import MAX_HEAD_BYTES, make_server
from twinpool.router.openai.tokenizer import ChatTokenizer

READ_LIMIT_S = 0.2
HOST = b"Host: router\r\n"
JSON_HEADERS = HOST + b"Content-Type: application/json\r\n"


@pytest.fixture
def port(backend: Any, tokenizer: ChatTokenizer) -> Iterator[int]:
    app = create_app(backend, tokenizer, "tiny", door=Door(read_limit_s=READ_LIMIT_S))
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = make_server(app, RouterSpec(request_read_s=READ_LIMIT_S))
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


def talk(port: int, *parts: bytes) -> tuple[int, dict[str, str], Any]:
    """Send, and read to the end of the connection; return status, headers and the JSON body."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    names = [line.partition(": ")[0].lower() for line in lines]
    assert len(names) == len(set(names)), f"a header twice: {names}"
    headers = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in lines}
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    return int(status.split()[1]), headers, json.loads(body)


NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"nonsense\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
    b"GET http:// HTTP/1.1\r\n" + HOST + b"\r\n",
    "GET /café HTTP/1.1\r\n".encode("latin-1") + HOST + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEADERS + b"Content-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEADERS + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEADERS + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
]


def test_what_is_no_http_gets_the_envelope(port: int) -> None:
    for data in NO_HTTP:
        status, headers, body = talk(port, data)
        assert (status, body["error"]["code"]) == (400, "invalid_http"), data
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert headers["connection"] == "close"


def test_a_head_beyond_the_limit_is_refused(port: int) -> None:
    """In one header, in many, in the path; complete or never ending."""
    many = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 100) for i in range(MAX_HEAD_BYTES // 100))
    for head in (
        b"GET /health HTTP/1.1\r\n" + HOST + b"X-Large: " + b"y" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + many + b"\r\n",
        b"GET /" + b"y" * (2 * MAX_HEAD_BYTES) + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"X-Endless: " + b"y" * (8 * MAX_HEAD_BYTES),
    ):
        status, _, body = talk(port, head)
        assert (status, body["error"]["code"]) == (431, "headers_too_large")


def test_a_slow_head_and_a_slow_body_are_timed_out(port: int) -> None:
    """Also when bytes keep coming: the limit is for the whole."""
    status, _, body = talk(port, b"GET /health HTTP/1.1\r\n", b"Host:")
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    head = b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEADERS + b"Content-Length: 100\r\n\r\n"
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as others:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(head + b"{")
            assert others.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
            received = b""
            while chunk := slow.recv(65536):
                received += chunk
        assert received.startswith(b"HTTP/1.1 408 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        assert others.get("/health").status_code == 200


def test_silent_connections_are_closed_without_a_word(port: int) -> None:
    for opening in (b"", b"\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(opening)
            assert connection.recv(65536) == b""


def test_nothing_is_mixed_into_an_answer_that_runs(port: int, backend: Any, say: Any, new_gate: Any) -> None:
    """Garbage after a request whose stream has begun: the connection ends, without a second status line."""
    gate = new_gate()
    events = say("hello world")
    backend.script = lambda request: [events[0], gate, *events[1:]]
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEADERS + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        received = connection.recv(65536)
        connection.sendall(b"\x00garbage\r\n\r\n")
        while chunk := connection.recv(65536):
            received += chunk
    gate.open()
    assert received.count(b"HTTP/1.1") == 1
    assert b"[DONE]" not in received
    assert backend.closed.wait(10)


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live"])
def test_headers_come_once_and_head_works(port: int, path: str) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        for answer in (
            client.get(path),
            client.get("/v1/models"),
            client.post("/v1/completions", json={"prompt": "a"}),
        ):
            for name in ("server", "date", "content-type", "content-length", "x-request-id"):
                assert len(answer.headers.get_list(name)) == 1, name
            assert answer.headers["server"] == "twinpool"


WRONG = [
    ("GET", "/v1/completions", 405, "method_not_allowed"),
    ("PUT", "/v1/models", 405, "method_not_allowed"),
    ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
    ("GET", "/v1/nothing", 404, "not_found"),
    ("GET", "/openapi", 404, "not_found"),
    ("GET", "/docs", 404, "not_found"),
    ("GET", "/v1/models/", 404, "model_not_found"),
]


def test_wrong_paths_and_methods_get_the_envelope(port: int) -> None:
    for method, path, status, code in WRONG:
        answer = httpx.request(method, f"http://127.0.0.1:{port}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), path
        assert (status == 405) == ("allow" in answer.headers)


def test_an_upgrade_is_not_taken_and_the_request_is_served(port: int) -> None:
    for protocol in ("websocket", "h2c"):
        headers = {"connection": "Upgrade", "upgrade": protocol}
        assert httpx.get(f"http://127.0.0.1:{port}/health", headers=headers).status_code == 200
