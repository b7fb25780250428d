"""GET /v1/models and GET /v1/models/{id}."""

import time
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from .serving import Serving


def add_models(app: FastAPI, serving: Serving) -> None:
    created_s = int(time.time())

    def describe() -> dict[str, Any]:
        card = {"id": serving.model_name, "object": "model", "created": created_s, "owned_by": "twinpool"}
        return card | {"max_model_len": serving.context_length}

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [describe()]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> JSONResponse:
        serving.model(name)
        return JSONResponse(describe())
