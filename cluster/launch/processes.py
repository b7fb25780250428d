"""The supervisors of one cluster: created, asked, replaced when they die, stopped. Everything that talks to actors.

A supervisor restarts its child by itself; here a dead supervisor is replaced, by the same rule (restarts.py).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ..protocol.errors import LaunchError
from .child import MAX_EXITS, ChildState, ChildStatus, Exit
from .ray_session import local_only, nodes
from .restarts import RestartPolicy, Restarts
from .roles import RoleProcess
from .supervisor import Report, Supervisor

LOOK_S = 0.2
KILL_MARGIN_S = 6.0  # beyond the grace: SIGKILL, and the supervisor's answer


@dataclass
class Supervised:
    """One process as the launcher sees it."""

    process: RoleProcess
    handle: Any
    child: ChildStatus | None = None
    host: str | None = None
    supervisor_pid: int | None = None
    started_s: float = field(default_factory=time.monotonic)
    earlier_exits: deque[Exit] = field(default_factory=lambda: deque(maxlen=MAX_EXITS))
    num_earlier_restarts: int = 0
    supervisor_deaths: Restarts = field(default_factory=lambda: Restarts(RestartPolicy()))
    retry_at_s: float | None = None  # set while its supervisor is dead
    is_leaving: bool = False  # asked to stop: not to be replaced
    lost_reason: str | None = None  # its supervisor died too often
    question: Any = None  # asked and not answered yet; never more than one, however long an answer takes

    @property
    def state(self) -> ChildState:
        if self.lost_reason is not None:
            return "failed"
        if self.retry_at_s is not None:
            return "restarting"
        return self.child.state if self.child else "starting"

    @property
    def reason(self) -> str | None:
        if self.lost_reason is not None:
            return self.lost_reason
        return self.child.reason if self.child else "waits for room on a Ray node"

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child and self.retry_at_s is None and self.lost_reason is None else None

    @property
    def exits(self) -> list[Exit]:
        return [*self.earlier_exits, *(self.child.exits if self.child else ())]

    def ask(self) -> Any:
        """Return the pending question about the child, asking it first if there is none."""
        if self.question is None:
            self.question = self.handle.status.remote()
        return self.question

    @property
    def num_restarts(self) -> int:
        return self.num_earlier_restarts + (self.child.num_restarts if self.child else 0)


class Processes:
    """All supervised processes by name. Not thread-safe; the launcher holds its lock."""

    def __init__(self, lifeline: Path) -> None:
        self.table: dict[str, Supervised] = {}
        self._lifeline = lifeline
        self._num_created = 0

    def start(self, wanted: Iterable[RoleProcess]) -> None:
        """Create the supervisors, all at once; whether they come up shows in refresh()."""
        for process in wanted:
            self.table[process.name] = Supervised(process, self._create(process))

    def refresh(self, timeout_s: float) -> None:
        """Ask every supervisor about its child; replace those that are dead and due."""
        asked = {s.ask(): s for s in self.table.values() if s.retry_at_s is None and not s.lost_reason}
        if asked:
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
            for reference in answered:
                asked[reference].question = None
                self._take_answer(asked[reference], reference)
        for supervised in self.table.values():
            if supervised.is_leaving or supervised.retry_at_s is None:
                continue
            if time.monotonic() >= supervised.retry_at_s:
                supervised.handle = self._create(supervised.process)
                supervised.retry_at_s = None
                supervised.started_s = time.monotonic()

    def ask_to_stop(self, names: Iterable[str], grace_s: float) -> list[Any]:
        """Send SIGTERM, after `grace_s` SIGKILL, to these; returns what wait_stopped() waits for."""
        leaving = [self.table[name] for name in names]
        for supervised in leaving:
            supervised.is_leaving = True
        return [supervised.handle.stop.remote(grace_s) for supervised in leaving]

    def discard(self, names: Iterable[str]) -> None:
        """End the supervisors of processes that were asked to stop, and forget them."""
        for name in names:
            ray.kill(self.table.pop(name).handle)

    def tail(self, name: str, num_lines: int) -> list[str]:
        """Return the last log lines of a process, or none when its supervisor is gone."""
        try:
            return ray.get(self.table[name].handle.tail.remote(num_lines), timeout=2.0)
        except RayError:
            return []

    def _create(self, process: RoleProcess) -> Any:
        self._num_created += 1
        return _create(process, self._num_created, self._lifeline)

    def _take_answer(self, supervised: Supervised, reference: Any) -> None:
        try:
            report: Report = ray.get(reference)
            supervised.child, supervised.host = report.child, report.host
            supervised.supervisor_pid = report.supervisor_pid
        except RayError as error:
            if supervised.child is not None or _is_dead(error):
                self._supervisor_died(supervised)

    def _supervisor_died(self, supervised: Supervised) -> None:
        now_s = time.monotonic()
        pid = supervised.supervisor_pid or 0
        supervised.num_earlier_restarts = supervised.num_restarts + 1
        supervised.earlier_exits.extend(supervised.child.exits if supervised.child else ())
        supervised.earlier_exits.append(Exit(time.time(), pid, None, f"its supervisor (pid {pid}) died"))
        supervised.child = supervised.supervisor_pid = supervised.question = None
        delay_s = supervised.supervisor_deaths.died(now_s, now_s - supervised.started_s)
        if delay_s is None:
            supervised.lost_reason = "its supervisor died too often"
        else:
            supervised.retry_at_s = now_s + delay_s


def _create(process: RoleProcess, incarnation: int, lifeline: Path) -> Any:
    local, remote = nodes()
    if not local:
        raise LaunchError("Ray has no living node on this host")
    demand = process.demand
    supervisor: Any = ray.remote(Supervisor)
    return supervisor.options(
        name=f"{process.name}.{incarnation}",  # Ray frees the name of a dead actor late, if at all
        num_cpus=demand.num_cpus,
        num_gpus=demand.num_gpus,
        label_selector=local_only(dict(demand.label_selector), local, len(remote)) or None,
        max_concurrency=4,
        max_restarts=0,
    ).remote(process.command, lifeline)


def wait_stopped(stopping: Sequence[Any], grace_s: float, is_hurried: Callable[[], bool] = lambda: False) -> bool:
    """Wait for processes that were asked to stop, no longer than they were given; False: it became urgent before."""
    deadline_s = time.monotonic() + grace_s + KILL_MARGIN_S
    waiting = list(stopping)
    while waiting and time.monotonic() < deadline_s:
        if is_hurried():
            return False
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_S)
    return True


def _is_dead(error: RayError) -> bool:
    return isinstance(error, RayActorError)
