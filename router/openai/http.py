"""The edge of HTTP: the body as a JSON object within bounds, the x-request-id, and a last net under every route.

Knows no endpoint's fields.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.protocol.errors import InvalidRequestError
from ...cluster.protocol.identity import new_request_id
from .errors import INTERNAL_ERROR, OnError

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_VALUES = 1_000_000  # numbers, strings, lists and objects
MAX_INLINE_BYTES = 64 * 1024  # more takes longer than a millisecond
READ_LIMIT_S = 30.0
CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

log = logging.getLogger(__name__)
T = TypeVar("T")


class RequestFrame:
    """ASGI middleware: mints the request id, puts x-request-id on every answer, turns a stray exception into a 500.

    The minted id is in `scope["state"]["request_id"]`; the client's own is only echoed. A body that is not complete
    after `read_limit_s` is a 408.
    """

    def __init__(
        self, app: ASGIApp, read_limit_s: float = READ_LIMIT_S, on_error: OnError = lambda path, reply: None
    ) -> None:
        self._app = app
        self._read_limit_s = read_limit_s
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        from_client = Headers(scope=scope).get("x-request-id", "")
        shown_id = from_client if CLIENT_REQUEST_ID.fullmatch(from_client) else request_id
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)["x-request-id"] = shown_id
            await send(message)

        try:
            await self._app(scope, BodyDeadline(receive, self._read_limit_s), send_with_id)
        except ClientDisconnect:
            log.info("request %s: the client left before its body was read", request_id)
        except Exception:
            log.exception("request %s failed inside the router", request_id)
            self._on_error(scope["path"], INTERNAL_ERROR)
            if is_started:
                raise  # the server closes the connection, so the client sees that the answer is cut
            await INTERNAL_ERROR.response()(scope, receive, send_with_id)


class BodyDeadline:
    """An ASGI `receive` whose body must be complete in time; what comes after the body has no limit."""

    def __init__(self, receive: Receive, limit_s: float) -> None:
        self._receive = receive
        self._deadline_s = asyncio.get_running_loop().time() + limit_s
        self._is_complete = False

    async def __call__(self) -> Message:
        """Raises InvalidRequestError: 408."""
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError as error:
            raise InvalidRequestError("The body did not arrive in time.", code="request_timeout", status=408) from error
        self._is_complete = not message.get("more_body", False)
        return message


async def read_json_object(request: Request) -> dict[str, Any]:
    """Return the body. Raises InvalidRequestError: 415, 413, or 400 for anything that is not a strict JSON object."""
    return parse_json_object(await read_body(request))


async def read_body(request: Request) -> bytes:
    """Return the bytes of a body that says it is JSON. Raises InvalidRequestError: 415, or 413."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequestError(
            "The body must be JSON; send the header Content-Type: application/json.",
            code="unsupported_media_type",
            status=415,
        )
    return await _read_all(request)


async def parse_aside(body: bytes, parse: Callable[[dict[str, Any]], T]) -> T:
    """Return `parse` of the JSON object that `body` is; in a thread when it is so long that streams would wait."""

    def work() -> T:
        return parse(parse_json_object(body))

    return work() if len(body) <= MAX_INLINE_BYTES else await asyncio.to_thread(work)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse strictly: UTF-8, no NaN or Infinity, no unpaired surrogate, an object on top, bounded in depth and size."""
    if _has_too_many_values(body):
        raise InvalidRequestError(f"The body holds more than {MAX_VALUES} values.", code="invalid_json")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error) if len(body) else "it is empty"
        raise InvalidRequestError(f"The body is not valid JSON: {reason}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_json")
    return cast(dict[str, Any], value)


def _has_too_many_values(body: bytes) -> bool:
    """True above MAX_VALUES separators and brackets outside of strings: parsing lets no other thread run."""
    if _num_separators(body) <= MAX_VALUES:
        return False
    quotes_only = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if quotes_only.count(b'"') > 2 * MAX_VALUES:
        return True
    return sum(map(_num_separators, quotes_only.split(b'"')[::2])) > MAX_VALUES


def _num_separators(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


async def _read_all(request: Request) -> bytes:
    """Read to the end. What is beyond the limit is dropped as it comes, so that the client gets to read the 413."""
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= MAX_BODY_BYTES:
            chunks.append(chunk)
        else:
            chunks.clear()
        if num_bytes > 2 * MAX_BODY_BYTES:
            break
    if num_bytes > MAX_BODY_BYTES:
        raise InvalidRequestError(
            f"The body is larger than the {MAX_BODY_BYTES} bytes allowed.", code="request_too_large", status=413
        )
    return b"".join(chunks)
