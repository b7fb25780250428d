"""Leaving without cutting anybody off: new requests are refused, running ones go on for a while. Knows no signals.

GET and HEAD are served to the end: health checks and scrapes must see that the router leaves.
"""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from .openai.errors import RETRY_AFTER_S, ErrorReply, OnError

DRAINING = ErrorReply(
    503,
    "The router is shutting down and takes no new requests.",
    "draining",
    headers={"retry-after": str(RETRY_AFTER_S), "connection": "close"},
)


class Drain:
    """Counts requests from their headers to the last byte of their answer."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        self.is_draining = True

    def enter(self) -> None:
        self.num_running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.num_running -= 1
        if self.num_running == 0:
            self._idle.set()

    async def is_idle_within(self, limit_s: float) -> bool:
        """Wait until nothing runs; return whether that came in time."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class DrainGate:
    """ASGI middleware: counts what runs, and refuses what is new while draining."""

    def __init__(self, app: ASGIApp, drain: Drain, on_error: OnError) -> None:
        self._app = app
        self._drain = drain
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        if self._drain.is_draining:
            self._on_error(scope["path"], DRAINING)
            await DRAINING.response()(scope, receive, send)
            return
        self._drain.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.leave()
