"""What a running cluster says about itself, parsed: the launcher's `status` and the router's GET /status.

Only what the doctor reads. Nothing is optional that both always say, and no number is bounded: judging is not parsing.
"""

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class LoadDocument(Document):
    """See protocol/messages.py `Load`."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_granted_blocks: int
    num_sequences: int

    @property
    def num_held_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks - self.num_cached_blocks


class WorkerDocument(Document):
    """A worker as the router knows it: router/service.py."""

    name: str
    role: str
    state: str
    pid: int
    last_heartbeat_s: float
    last_progress_s: float  # since its engine's loop moved, or had nothing to do
    fingerprint: str
    dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    load: LoadDocument | None  # none before its first heartbeat


class RouterDocument(Document):
    incarnation: str
    uptime_s: float
    queued: int
    running: int
    malformed_messages: int
    loop_lag_s: float
    workers: tuple[WorkerDocument, ...]

    def worker(self, name: str, pid: int) -> WorkerDocument | None:
        return next((w for w in self.workers if w.name == name and w.pid == pid), None)


class ProcessDocument(Document):
    """A process as the launcher knows it: launch/pools.py."""

    name: str
    role: str
    state: str
    reason: str | None
    pid: int | None


class IncidentDocument(Document):
    at_s_ago: float
    worker: str
    what: str


class LauncherDocument(Document):
    name: str
    state: str
    processes: tuple[ProcessDocument, ...]
    incidents: tuple[IncidentDocument, ...]
