"""The page at `/`: static files without a build step, and GET /cluster, which tells it what to show.

What is told is what a client may know: no process, host, path or incident.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from .drain import Drain
from .serving import Serving

ROLES = ("PROMPT", "COMPLETION")
LOAD_FIELDS = ("num_blocks", "num_free_blocks", "num_cached_blocks", "num_queued_tokens", "num_sequences")
MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, serving: Serving, drain: Drain) -> None:
    for name, content in _read_page().items():
        path = "/" if name == "index.html" else f"/page/{name}"
        media_type = MEDIA_TYPES[name.rpartition(".")[2]]

        async def show(content: bytes = content, media_type: str = media_type) -> Response:
            return Response(content, media_type=media_type, headers=HEADERS)

        app.add_api_route(path, show, methods=["GET", "HEAD"], response_model=None)

    @app.get("/cluster")
    async def show_cluster() -> JSONResponse:
        body = describe_cluster(serving, drain.is_draining)
        return JSONResponse(body, headers={"cache-control": "no-store"})


def describe_cluster(serving: Serving, is_draining: bool) -> dict[str, Any]:
    """Return what the page shows of the cluster, JSON-ready."""
    status = serving.backend.status()
    workers: list[Mapping[str, Any]] = status["workers"]
    state = "draining" if is_draining else "ready" if serving.backend.is_ready else "not_ready"
    return {
        "model": serving.model_name,
        "max_model_len": serving.context_length,
        "state": state,
        "queued": status["queued"],
        "running": status["running"],
        "pools": [
            {"role": role, "workers": [_describe_worker(w) for w in workers if w["role"] == role]} for role in ROLES
        ],
        "latency": serving.metrics.recent.describe(),
    }


def _describe_worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    """The load is null until the first heartbeat."""
    load: Mapping[str, Any] = worker["load"] or {}
    return {"name": worker["name"], "state": worker["state"]} | {field: load.get(field) for field in LOAD_FIELDS}


def _read_page() -> dict[str, bytes]:
    folder = Path(__file__).with_name("page")
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.suffix[1:] in MEDIA_TYPES}
