"""The HTTP application: its routes (one module for each concept), and every error in OpenAI's shape.

`create_app` is what clients reach; `create_admin_app` tells an operator everything and is served on a unix socket only.
What a route does is in router/openai/.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..cluster.protocol.errors import InvalidRequestError
from .auth import NO_KEYS, ApiKeys, KeyGate
from .completion_routes import Handler, add_completions
from .document_routes import add_document
from .drain import Drain, DrainGate
from .generation import ANYBODY, Backend
from .health_routes import add_health
from .metrics import CONTENT_TYPE, Metrics
from .model_routes import add_models
from .openai.answer import KEEP_ALIVE_S
from .openai.errors import ErrorReply, OnError, RequestFailedError, reply_of
from .openai.http import READ_LIMIT_S, RequestFrame
from .openai.structured import GrammarCheck
from .openai.tokenizer import ChatTokenizer
from .page_routes import add_page
from .probe_routes import ProbeBackend, add_probes
from .request_log import log_refused
from .serving import Serving
from .tokenize_routes import add_tokenize
from .tracing import Traces

FORESEEN = (InvalidRequestError, RequestFailedError, HTTPException)


@dataclass(frozen=True)
class Door:
    """Who is let in, until when, and how long a request may take to come in."""

    keys: ApiKeys = NO_KEYS
    drain: Drain = field(default_factory=Drain)
    read_limit_s: float = READ_LIMIT_S


class Application:
    """Serves generation on a short way, and everything else by FastAPI, whose layers cost half a millisecond.

    `short_cuts` are handlers of POST routes that `api` has as well: same answers, same middleware, fewer layers.
    """

    def __init__(self, api: FastAPI, short_cuts: Mapping[str, Handler], on_error: OnError) -> None:
        self.api = api
        self._paths = frozenset(short_cuts)
        self._short_cuts: ASGIApp = ShortCuts(short_cuts, on_error)
        for layer in reversed(api.user_middleware):
            self._short_cuts = layer.cls(self._short_cuts, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_short = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths
        await (self._short_cuts if is_short else self.api)(scope, receive, send)


class ShortCuts:
    def __init__(self, handlers: Mapping[str, Handler], on_error: OnError) -> None:
        self._handlers = handlers
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._handlers[scope["path"]](request)
            await response(scope, receive, send)
        except FORESEEN as error:
            await answer_to(request, error, self._on_error)(scope, receive, send)


def create_app(
    backend: Backend,
    tokenizer: ChatTokenizer,
    model_name: str,
    keep_alive_s: float = KEEP_ALIVE_S,
    door: Door | None = None,
    traces: Traces | None = None,
) -> Application:
    """Return the application that serves `model_name` through `backend`."""
    door = door or Door()
    metrics = Metrics(backend, model_name)

    def count(path: str, reply: ErrorReply) -> None:
        metrics.count_error(path, reply.status, reply.code)

    app = _bare_app(
        "Twinpool",
        Middleware(RequestFrame, read_limit_s=door.read_limit_s, on_error=count),
        Middleware(KeyGate, keys=door.keys, on_error=count),
        Middleware(DrainGate, drain=door.drain, on_error=count),
    )
    grammars = GrammarCheck(tokenizer.grammars, lambda outcome: metrics.grammars.labels(outcome).inc())
    serving = Serving(backend, tokenizer, model_name, metrics, grammars, keep_alive_s, traces)
    _handle_errors(app, count)
    short_cuts = add_completions(app, serving)
    add_models(app, serving)
    add_tokenize(app, serving)
    add_health(app, backend, door.drain)
    add_page(app, serving, door.drain)
    add_document(app, model_name, bool(door.keys.callers))

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def show_metrics() -> Response:
        return Response(await metrics.exposition(), media_type=CONTENT_TYPE)

    return Application(app, short_cuts, count)


def create_admin_app(backend: ProbeBackend) -> FastAPI:
    """Return the application for the operator: GET /status, and POST /probe/… to time live workers."""
    app = _bare_app("Twinpool admin", Middleware(RequestFrame))
    _handle_errors(app, lambda path, reply: None)

    @app.get("/status")
    async def status() -> JSONResponse:
        return JSONResponse(backend.status())

    add_probes(app, backend)
    return app


def _bare_app(title: str, *outermost_first: Middleware) -> FastAPI:
    return FastAPI(title=title, openapi_url=None, redirect_slashes=False, middleware=outermost_first)


def _handle_errors(app: FastAPI, on_error: OnError) -> None:
    """Answer foreseen errors; what is not foreseen ends in RequestFrame."""

    async def handle(request: Request, error: Exception) -> Response:
        return answer_to(request, error, on_error)

    for kind in FORESEEN:
        app.add_exception_handler(kind, handle)


def answer_to(request: Request, error: Exception, on_error: OnError) -> Response:
    """Return the answer to a foreseen error, and note it."""
    reply = reply_of(error)
    on_error(request.url.path, reply)
    if not isinstance(error, RequestFailedError):  # those were accepted, and are logged at their end
        caller = getattr(request.state, "caller", ANYBODY)
        log_refused(request.state.request_id, reply.status, reply.code, caller.name)
    return reply.response()
