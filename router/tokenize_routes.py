"""POST /tokenize and POST /detokenize."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from .metrics import FINISHED
from .openai.http import parse_aside, read_body
from .openai.requests import parse_known
from .openai.tokenize import DetokenizeBody, detokenize, tokenize, tokenize_kind
from .serving import Serving


def add_tokenize(app: FastAPI, serving: Serving) -> None:
    def count(endpoint: str, num_unknown: int) -> None:
        serving.metrics.unknown_fields.labels(endpoint).inc(num_unknown)
        serving.metrics.count(endpoint, FINISHED)

    @app.post("/tokenize")
    async def tokenize_prompt(request: Request) -> JSONResponse:
        raw = await read_body(request)
        body, num_unknown = await parse_aside(raw, lambda data: parse_known(tokenize_kind(data), data))
        answer = await tokenize(body, serving.model(body.model))
        count("tokenize", num_unknown)
        return JSONResponse(answer)

    @app.post("/detokenize")
    async def detokenize_tokens(request: Request) -> JSONResponse:
        body, num_unknown = await parse_aside(await read_body(request), lambda data: parse_known(DetokenizeBody, data))
        answer = await detokenize(body, serving.model(body.model))
        count("detokenize", num_unknown)
        return JSONResponse(answer)
