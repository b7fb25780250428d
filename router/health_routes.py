"""GET /health, /health/ready and /health/live: constant time, no admission, no worker is asked."""

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from .drain import DRAINING, Drain
from .generation import Backend
from .openai.errors import RETRY_AFTER_S, ErrorReply

NOT_READY = ErrorReply(
    503, "No PROMPT and COMPLETION worker are ready.", "not_ready", headers={"retry-after": str(RETRY_AFTER_S)}
)


def add_health(app: FastAPI, backend: Backend, drain: Drain) -> None:
    @app.api_route("/health/live", methods=["GET", "HEAD"])
    async def live() -> JSONResponse:
        return JSONResponse({"status": "live"})

    @app.api_route("/health/ready", methods=["GET", "HEAD"])
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        if drain.is_draining:
            return DRAINING.response()
        return JSONResponse({"status": "ready"}) if backend.is_ready else NOT_READY.response()
