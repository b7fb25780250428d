"""POST /v1/completions and POST /v1/chat/completions."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response

from .openai.answer import JobResponse
from .openai.errors import RequestFailedError
from .openai.http import parse_aside, read_body
from .openai.prepare import Job, prepare_chat, prepare_completion
from .openai.requests import ChatBody, CompletionBody, SamplingBody, parse_known
from .openai.terms import Terms, terms_of
from .serving import Serving

B = TypeVar("B", bound=SamplingBody)
Handler = Callable[[Request], Awaitable[Response]]


def add_completions(app: FastAPI, serving: Serving) -> dict[str, Handler]:
    """Add both routes to `app`; return the handler of each path."""

    async def read(request: Request, kind: type[B], endpoint: str) -> B:
        body, num_unknown = await parse_aside(await read_body(request), lambda data: parse_known(kind, data))
        serving.metrics.unknown_fields.labels(endpoint).inc(num_unknown)
        return body

    def respond(job: Job) -> Response:
        return JobResponse(
            job, serving.backend, serving.tokenizer, serving.metrics, serving.keep_alive_s, serving.traces
        )

    def admitted(request: Request, body: SamplingBody) -> Terms:
        """Refuse what has no chance before its prompt costs anything. Raises RequestFailedError."""
        terms = terms_of(request, body)
        refusal = serving.backend.refusal(terms.caller, terms.priority)
        if refusal is not None:
            raise RequestFailedError(refusal)
        return terms

    async def completions(request: Request) -> Response:
        body = await read(request, CompletionBody, "completions")
        model, terms = serving.model(body.model), admitted(request, body)
        return respond(terms.put_on(await prepare_completion(body, model, request.state.request_id)))

    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatBody, "chat")
        model, terms = serving.model(body.model), admitted(request, body)
        return respond(terms.put_on(await prepare_chat(body, model, request.state.request_id)))

    handlers: dict[str, Handler] = {"/v1/completions": completions, "/v1/chat/completions": chat_completions}
    for path, handler in handlers.items():
        app.post(path)(handler)
    return handlers
