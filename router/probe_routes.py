"""POST /probe/passes and POST /probe/transfer, of the admin application: the router asks live workers for times.

A refusal is 409, `worker_busy` when the same question may be answered a moment later. A client that leaves ends its
probe. Knows no workers.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from ..cluster.protocol.errors import InvalidRequestError
from .generation import Backend
from .openai.http import read_json_object
from .openai.requests import parse_body
from .probes import PassesQuestion, ProbeRefusal, ProbeResult, TransferQuestion

T = TypeVar("T")


class ProbeBackend(Backend, Protocol):
    async def probe(self, question: PassesQuestion | TransferQuestion) -> ProbeResult:
        """Return the times, or why there are none. Being cancelled ends the probe."""
        ...


def add_probes(app: FastAPI, backend: ProbeBackend) -> None:
    """Add the routes. `rows` are pairs of tokens cached before and tokens to compute."""

    @app.post("/probe/passes")
    async def time_passes(request: Request) -> JSONResponse:
        question = parse_body(PassesQuestion, await read_json_object(request))
        result = await _while_client_waits(request, backend.probe(question))
        return JSONResponse({"pass_s": _times(result)})

    @app.post("/probe/transfer")
    async def time_transfer(request: Request) -> JSONResponse:
        question = parse_body(TransferQuestion, await read_json_object(request))
        result = await _while_client_waits(request, backend.probe(question))
        return JSONResponse({"transfer_s": _times(result)[0]})


def _times(result: ProbeResult) -> tuple[float, ...]:
    if isinstance(result, ProbeRefusal):
        code = "worker_busy" if result.is_retryable else "probe_refused"
        raise InvalidRequestError(result.reason, code=code, status=409)
    return result


async def _while_client_waits(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it and raise ClientDisconnect when the client leaves before."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
