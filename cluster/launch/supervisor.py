"""The Ray actor that holds one role's place in the cluster: its CPUs, its GPUs, its node. The role runs as its child.

Ray carries no tokens and no KV; an actor answers questions about its child and starts or ends it.
Actors are threaded (`max_concurrency`), so that a `stop` overtakes whatever else is being asked.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from .child import ChildCommand, ChildKeeper, ChildStatus
from .lifeline import watch

LAST_GRACE_S = 0.5  # a child has this long after its launcher was killed


@dataclass(frozen=True)
class Report:
    """What a supervisor says of its child and of itself."""

    child: ChildStatus
    host: str
    supervisor_pid: int


class Supervisor:
    """Keeps one child. It starts with the actor, so that a supervisor never exists without its process."""

    def __init__(self, command: ChildCommand, lifeline: Path) -> None:
        command.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._keeper = ChildKeeper(command)
        self._keeper.start()
        watch(lifeline, self._launcher_died)

    def status(self) -> Report:
        return Report(self._keeper.status(), os.uname().nodename, os.getpid())

    def stop(self, grace_s: float) -> ChildStatus:
        return self._keeper.stop(grace_s)

    def tail(self, num_lines: int) -> list[str]:
        return self._keeper.tail(num_lines)

    def _launcher_died(self) -> None:
        """Nobody is left to answer to: end the child, then this process."""
        self._keeper.stop(LAST_GRACE_S)
        os._exit(0)
