"""What a starting launcher tells whoever started it: one JSON object a line, down a pipe.

`twinpool up` shows them; nobody else reads them. Afterwards the launcher answers on its control socket (control.py).
"""

import contextlib
import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Event(BaseModel):
    """`process` and `ray` report progress, `ready`, `failed` and `stopped` end a stage of the cluster's life."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["ray", "process", "ready", "failed", "stopped"]
    name: str = ""
    state: str = ""
    elapsed_s: float = 0.0
    message: str = ""
    hint: str | None = None
    logs: dict[str, list[str]] = Field(default_factory=dict)  # failed: the last lines of each process not ready


class EventPipe:
    """The writing end. Once the reader is gone, as after `up --detach`, events go nowhere."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor

    def __call__(self, event: Event) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, event.model_dump_json().encode() + b"\n")
