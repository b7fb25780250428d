"""GET /openapi.json."""

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from .. import __version__
from .openai.document import openapi_document


def add_document(app: FastAPI, model_name: str, has_keys: bool) -> None:
    document = openapi_document(model_name, __version__, has_keys)

    @app.get("/openapi.json")
    async def show_document() -> JSONResponse:
        return JSONResponse(document)
