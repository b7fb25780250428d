"""Every route, asked in every way that has fooled others, over a real connection: only /health/live is open.

test_auth.py has the keys themselves; here it is what a request line and a Host header can do to the gate.
"""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
from twinpool.cluster.config import RouterSpec
from twinpool.router.app import Application, Door, create_app
from twinpool.router.auth import load_keys
from twinpool.router.http_server import make_server
from twinpool.router.openai.tokenizer import ChatTokenizer

KEY = "alice-secret-0123456789"
OPEN_PATH = "/health/live"
METHODS = ("GET", "POST", "HEAD", "OPTIONS")
WRONG_KEYS = ("", f"Authorization: Bearer {KEY}x\r\n", f"Authorization: Basic {KEY}\r\n", f"X-API-Key: {KEY}\r\n")
# Each makes another path, or another host, out of a route.
TARGETS = (
    "{path}",
    "/{path}",
    "{path}/",
    "{path}?x=/health/live",
    "{path}#/health/live",
    "{path};/health/live",
    "{path}%2e",
    "/%2e{path}",
    "/health/live/..{path}",
    "/health/live/%2e%2e{path}",
    "/health/live%2f..{path}",
    "/health/live%00{path}",
    "http://router{path}",
    "http://router/health/live/..{path}",
    "//health/live{path}",
)
HOSTS = ("router", "a/?x=", "a/health/live?x=", "router/health/live#", "[", "a@b:c:d", "")
EXTRA_HEADERS = (
    "",
    "X-Original-URL: /health/live\r\nX-Rewrite-URL: /health/live\r\nX-Forwarded-Prefix: /health/live\r\n",
)


@dataclass(frozen=True)
class Front:
    """A served router, and the paths that it has."""

    app: Application
    port: int

    @property
    def paths(self) -> list[str]:
        """Every route, a value for each parameter."""
        paths = {getattr(route, "path", "") for route in self.app.api.routes}
        assert len(paths) > 10, paths
        return sorted(re.sub(r"{[^}]+}", "tiny", path) for path in paths)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@pytest.fixture
def front(backend: Any, tokenizer: ChatTokenizer) -> Iterator[Front]:
    keys = load_keys(None, {"TWINPOOL_API_KEYS": f"alice={KEY}"})
    app = create_app(backend, tokenizer, "tiny", door=Door(keys))
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = make_server(app, RouterSpec())
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        yield Front(app, listener.getsockname()[1])
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


def ask(connection: socket.socket, method: str, target: str, host: str = "router", headers: str = "") -> int:
    """Send a request and read its whole answer from a connection that stays open; return the status."""
    head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n{headers}\r\n"
    connection.sendall(head.encode("latin-1"))
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = connection.recv(65536)
        assert chunk, f"no answer to {head!r}"
        received += chunk
    start, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", start)
    while method != "HEAD" and length is not None and len(body) < int(length[1]):
        body += connection.recv(65536)
    return int(start.split()[1])


def status_of(front: Front, *arguments: str) -> int:
    with front.connect() as connection:
        return ask(connection, *arguments)


def test_no_route_opens_without_a_key_however_it_is_asked_for(front: Front, backend: Any) -> None:
    """Unknown paths and methods are no exception: a stranger is not even told what exists."""
    targets = [target.format(path=path) for path in front.paths if path != OPEN_PATH for target in TARGETS]
    opened: list[tuple[str, str, str, int]] = []
    with front.connect() as connection:
        for target in targets:
            for method in METHODS:
                for headers in WRONG_KEYS:
                    status = ask(connection, method, target, "router", headers)
                    if status != 401:
                        opened.append((method, target, headers, status))
    assert opened == []
    assert len(targets) > 150
    assert backend.requests == []


def test_no_host_and_no_proxy_header_opens_a_route(front: Front) -> None:
    for path in front.paths:
        for host in HOSTS:
            for headers in EXTRA_HEADERS:
                status = status_of(front, "GET", path, host, headers)
                assert status == (200 if path == OPEN_PATH else 401), (path, host, headers)


def test_what_is_beside_the_open_path_is_closed(front: Front) -> None:
    """The path itself is open, whatever the query and the way it is written; nothing that only looks like it is."""
    for target in ("/health/live", "/health/live?x=1", "/health/%6cive", "http://elsewhere/health/live"):
        assert status_of(front, "GET", target) == 200, target
    for target in (
        "/health/live/",
        "//health/live",
        "/health//live",
        "/HEALTH/LIVE",
        "/health/live%20",
        "/health/live%2f",
    ):
        assert status_of(front, "GET", target) == 401, target
    assert status_of(front, "GET", "http://router?/health/live") == 400, "no HTTP"
    for method in ("POST", "OPTIONS", "PUT", "DELETE"):
        assert status_of(front, method, "/health/live") == 405, method


def test_the_right_key_opens_every_route(front: Front) -> None:
    """So that the tests above are about keys."""
    right = f"Authorization: Bearer {KEY}\r\n"
    for path in front.paths:
        assert status_of(front, "GET", path, "router", right) in (200, 405), path


def test_a_key_counts_for_its_own_request_alone(front: Front) -> None:
    """One connection, kept open and in one piece: the request after one with a key needs a key again."""
    right = f"Authorization: Bearer {KEY}\r\n"
    with front.connect() as connection:
        for _ in range(3):
            assert ask(connection, "GET", "/v1/models", "router", right) == 200
            assert ask(connection, "GET", "/v1/models") == 401
    with front.connect() as connection:
        first = f"GET /v1/models HTTP/1.1\r\nHost: router\r\n{right}\r\n"
        connection.sendall((first + "GET /v1/models HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n").encode())
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"401"]


def test_a_strange_host_changes_no_answer(front: Front) -> None:
    """Errors name their path in a metric: that must not be taken from the Host, nor fail because of it."""
    right = f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    for host in HOSTS:
        assert status_of(front, "POST", "/v1/completions", host, right) == 400, host
        assert status_of(front, "GET", "/v1/nowhere", host, right) == 404, host
