"""What the router says about itself and its workers: its admin socket and its readiness. Asks; knows no Ray."""

from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class WorkerView(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    role: str
    state: str
    incarnation: str | int | None = None
    pid: int | None = None
    load: dict[str, Any] | None = None  # none before its first heartbeat
    since_s: float | None = None

    @property
    def is_ready(self) -> bool:
        return self.state in ("ready", "alive")


class IncidentView(BaseModel):
    model_config = ConfigDict(extra="ignore")

    at_s_ago: float
    worker: str
    what: str


class RouterStatus(BaseModel):
    model_config = ConfigDict(extra="allow")

    workers: list[WorkerView] = Field(default_factory=list[WorkerView])
    incidents: list[IncidentView] = Field(default_factory=list[IncidentView])
    queued: int | None = None
    running: int | None = None
    ready: bool = False


class RouterView:
    """Asks the router, each time with a short deadline; a router that is down is an answer, not an error."""

    def __init__(self, admin_socket: Path, endpoint: str) -> None:
        self._admin = httpx.Client(transport=httpx.HTTPTransport(uds=str(admin_socket)), base_url="http://router")
        self._http = httpx.Client(base_url=endpoint, trust_env=False)

    def status(self, timeout_s: float = 0.3) -> RouterStatus | None:
        answer = self.answer(timeout_s)
        try:
            return None if answer is None else RouterStatus.model_validate_json(answer)
        except ValidationError:
            return None

    def answer(self, timeout_s: float) -> bytes | None:
        """Return the router's whole status as it sent it; None when it does not answer."""
        try:
            return self._admin.get("/status", timeout=timeout_s).content
        except httpx.HTTPError:
            return None

    def is_gone(self, timeout_s: float = 0.3) -> bool:
        """Whether nobody listens any more; a router that is slow to answer is not gone."""
        try:
            self._admin.get("/status", timeout=timeout_s)
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:
            return False
        return False

    def is_ready(self, timeout_s: float = 0.3) -> bool:
        """Whether the endpoint would serve a request now. The endpoint itself is asked only what needs no API key."""
        status = self.status(timeout_s)
        try:
            is_live = self._http.get("/health/live", timeout=timeout_s).status_code == 200
        except httpx.HTTPError:
            return False
        return is_live and status is not None and status.ready

    def close(self) -> None:
        self._admin.close()
        self._http.close()
