"""uvicorn as the router runs it: nothing but our errors on the wire, a limit on every wait and every size.

What is no HTTP never reaches an application; it is answered here, in the same shape.
"""

import asyncio
import json
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ..cluster.config import RouterSpec
from .connection import ClientConnection
from .openai.errors import ErrorReply

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
CONNECTION_IDLE_S = 75  # longer than clients' pools keep a connection (aiohttp 15 s, httpx 5 s) and proxies (60 s)
CUT_S = 5  # after the drain: for the last bytes of answers that were ended
LINGER_S = 1.0  # a refused client gets to read why before the connection is reset

MALFORMED = ErrorReply(400, "This is not a valid HTTP request.", "invalid_http")
HEAD_TOO_LARGE = ErrorReply(
    431, f"The request line and headers are larger than the {MAX_HEAD_BYTES} bytes allowed.", "headers_too_large"
)
HEAD_TOO_SLOW = ErrorReply(408, "The headers did not arrive in time.", "request_timeout")


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: several servers share this process, and its main stops them."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class GuardedConnection(ClientConnection):
    """One connection. Beyond uvicorn's: a request's head is bounded in bytes and time; what is no HTTP gets JSON."""

    def __init__(self, *arguments: Any, read_limit_s: float, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._read_limit_s = read_limit_s
        self._is_in_head = False
        self._num_head_bytes = 0
        self._is_refused = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_refused:
            return
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(HEAD_TOO_LARGE)
        elif self._running_cycle() is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_waiting()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            self._refuse(HEAD_TOO_LARGE)
            raise ValueError("the head is too large")  # ends the parser, which then asks for a 400
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._stop_waiting()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser could not read; unless an answer is on its way, into which nothing may be mixed."""
        self._refuse(MALFORMED)

    def _running_cycle(self) -> RequestResponseCycle | None:
        cycle = cast(RequestResponseCycle | None, self.cycle)  # none before the first request
        return None if cycle is None or cycle.response_complete else cycle

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._read_limit_s, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self._deadline = None
        if self._is_in_head:
            self._refuse(HEAD_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, reply: ErrorReply) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_waiting()
        cycle = self._running_cycle()
        if cycle is not None:
            if cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(_as_bytes(reply, self.server_state.default_headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def make_server(app: ASGIApp, spec: RouterSpec, **address: Any) -> Server:
    """Return a server for `app`, with the limits of `spec`; `address` is host and port, or uds."""
    protocol: Any = partial(GuardedConnection, slow_reader_s=spec.slow_reader_s, read_limit_s=spec.request_read_s)
    config = uvicorn.Config(
        app,
        **address,
        loop="uvloop",
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        proxy_headers=False,  # nothing here asks where a client is
        log_config=None,
        server_header=False,
        headers=[("server", "twinpool")],
        timeout_keep_alive=CONNECTION_IDLE_S,
        timeout_graceful_shutdown=CUT_S,
    )
    return Server(config)


def _as_bytes(reply: ErrorReply, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    body = json.dumps(reply.body()).encode()
    head = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}".encode()]
    head += [b"%b: %b" % header for header in default_headers]
    head += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
    return b"\r\n".join(head) + b"\r\n\r\n" + body
