"""A client's connection, below ASGI: whoever does not read what is sent loses it, and the memory it held is free.

uvicorn stops a sender whose bytes nobody takes, but waits for such a reader for ever. Here the connection is cut once
nothing of what is buffered has left for a while; to the application that is a client that went away.
"""

import asyncio
import logging
import socket
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_UNSENT_BYTES = 65536  # in the kernel, a connection; its default is megabytes
LOOKS_A_LIMIT = 4

log = logging.getLogger(__name__)


class SendWatch:
    """Tell since when nothing of what waits to be sent has gone. Pure; `look` every now and then."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._num_gone_bytes = 0
        self._since_s = now

    def look(self, num_written_bytes: int, num_waiting_bytes: int, now: float) -> bool:
        """Return whether the reader has stalled for the limit."""
        num_gone_bytes = num_written_bytes - num_waiting_bytes
        if num_waiting_bytes == 0 or num_gone_bytes > self._num_gone_bytes:
            self._num_gone_bytes = num_gone_bytes
            self._since_s = now
        return now - self._since_s >= self._limit_s


class CountedTransport:
    """A transport that counts what is written to it, and is otherwise the one it wraps."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.num_written_bytes = 0

    def write(self, data: bytes) -> None:
        self.num_written_bytes += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class ClientConnection(HttpToolsProtocol):
    """uvicorn's protocol with a limit on stalled readers."""

    def __init__(self, *arguments: Any, slow_reader_s: float, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._slow_reader_s = slow_reader_s
        self._looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        counted = CountedTransport(transport)
        super().connection_made(cast(asyncio.Transport, counted))
        _bound_kernel_buffer(transport)
        self._counted = counted
        self._watch = SendWatch(self._slow_reader_s, self.loop.time())
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(self._slow_reader_s / LOOKS_A_LIMIT, self._look)

    def _look(self) -> None:
        num_waiting_bytes = self.transport.get_write_buffer_size()
        if self._watch.look(self._counted.num_written_bytes, num_waiting_bytes, self.loop.time()):
            log.warning(
                "request %s: the client has read nothing for %g s, its connection is cut",
                self.scope.get("state", {}).get("request_id") if self.scope else None,
                self._slow_reader_s,
            )
            self.transport.abort()
        else:
            self._look_later()


def _bound_kernel_buffer(transport: asyncio.Transport) -> None:
    """Let the kernel hold little that is not on its way, so that a stall is noticed while little is lost in it."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
