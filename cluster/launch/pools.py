"""The desired processes of one cluster, and what is known about each: the launcher's view and the router's, merged."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..config import ClusterSpec
from ..protocol.errors import LaunchError
from .placement import Demand, check_demand
from .processes import Processes, Supervised, wait_stopped
from .ray_session import nodes
from .roles import POOLS, ROUTER, Programs, RunPaths, demand_of, role_process
from .router_view import RouterStatus, RouterView, WorkerView

NUM_INCIDENTS = 32
POLL_TIMEOUT_S = 0.3
CLOSED_S = 6.0  # a router that has closed its sockets ends within so long, whether or not Ray lives to tell
DRAIN_MARGIN_S = 12.0  # beyond the drain: answers that are ended in words, and the router's own end


class Pools:
    """Starts, scales, watches and stops the router and both pools; thread-safe."""

    def __init__(self, spec: ClusterSpec, programs: Programs, paths: RunPaths, router: RouterView) -> None:
        self._spec = spec
        self._programs = programs
        self._paths = paths
        self._router = router
        self._lock = threading.Lock()  # the table of processes
        self._scaling = threading.Lock()
        self._processes = Processes(paths.lifeline)
        self._counts = {"prompt": spec.prompt.num_workers, "completion": spec.completion.num_workers}
        self._view: RouterStatus | None = None
        self._is_stopping = False
        self._removed: deque[tuple[float, str]] = deque(maxlen=NUM_INCIDENTS)

    @staticmethod
    def demands(spec: ClusterSpec, counts: Mapping[str, int] | None = None) -> list[Demand]:
        """What the whole cluster asks of its nodes."""
        counts = counts or {"prompt": spec.prompt.num_workers, "completion": spec.completion.num_workers}
        names = [(role, f"{role}-{ordinal}") for role in POOLS for ordinal in range(counts[role])]
        return [demand_of(spec, role, name) for role, name in [(ROUTER, ROUTER), *names]]

    def start_all(self) -> None:
        """Start everything at once; workers retry until the router is there."""
        with self._lock:
            self._processes.start([self._process(ROUTER, 0)])
            self._processes.start(
                self._process(role, ordinal) for role in POOLS for ordinal in range(self._counts[role])
            )

    def tick(self) -> None:
        """Bring what is known up to date, and replace supervisors that died."""
        if not self._is_stopping:  # then nobody is replaced, and a Ray that has died must hold nothing up
            with self._lock:
                self._processes.refresh(POLL_TIMEOUT_S)
        self._view = self._router.status()

    def states(self) -> dict[str, str]:
        """Return one word a process, as last seen."""
        with self._lock:
            return {name: _state(s, self._view_of(s), self._view) for name, s in self._processes.table.items()}

    def is_ready(self) -> bool:
        return all(state == "ready" for state in self.states().values()) and self._router.is_ready()

    def reason(self, name: str) -> str:
        with self._lock:
            return self._processes.table[name].reason or ""

    def tail(self, name: str, num_lines: int) -> list[str]:
        with self._lock:
            return self._processes.tail(name, num_lines)

    def status(self) -> dict[str, Any]:
        """Ask everyone and return the merged answer, ready for JSON."""
        self.tick()
        with self._lock:
            table = dict(self._processes.table)
        rows = [_row(table[name], self._view_of(table[name]), self._view) for name in sorted(table, key=_order)]
        return {
            "state": "ready" if all(row["state"] == "ready" for row in rows) else "degraded",
            "processes": rows,
            "incidents": self._incidents(table),
            "router": self._view.model_dump(exclude={"workers", "incidents"}) if self._view else None,
        }

    def scale(self, counts: Mapping[str, int], timeout_s: float) -> dict[str, list[str]]:
        """Make the pools this large; new workers are waited for; what ran on leaving ones goes on elsewhere."""
        for role, count in counts.items():
            if count < 1:
                raise LaunchError(f"a pool needs at least one worker; {role} was to have {count}")
        with self._scaling:
            wanted = {**self._counts, **counts}
            check_demand(self.demands(self._spec, wanted), nodes()[0])
            added = self._add(wanted)
            removed = self._remove(wanted, timeout_s)
            self._counts = wanted
            self._await(added, timeout_s)
        return {"added": added, "removed": removed}

    def stop_all(self, grace_s: float, is_hurried: Callable[[], bool]) -> None:
        """End the router first, which drains for as long as its spec says unless that is hurried; then the workers."""
        self._is_stopping = True
        with self._lock:
            names = set(self._processes.table)
        self._drain([ROUTER] if ROUTER in names else [], is_hurried)
        self._stop(sorted(names - {ROUTER}), grace_s)

    def _drain(self, names: list[str], is_hurried: Callable[[], bool]) -> None:
        grace_s = self._spec.router.drain_s + DRAIN_MARGIN_S
        with self._lock:
            stopping = self._processes.ask_to_stop(names, grace_s)
        if wait_stopped(stopping, grace_s, lambda: is_hurried() or self._router.is_gone()):
            pass
        elif is_hurried():
            with self._lock:
                stopping = self._processes.ask_to_stop(names, DRAIN_MARGIN_S)  # a second signal ends it at once
            wait_stopped(stopping, DRAIN_MARGIN_S)
        else:
            wait_stopped(stopping, CLOSED_S)
        with self._lock:
            self._processes.discard(names)

    def _add(self, wanted: Mapping[str, int]) -> list[str]:
        new = [self._process(role, i) for role in POOLS for i in range(self._counts[role], wanted[role])]
        with self._lock:
            self._processes.start(new)
        return [process.name for process in new]

    def _remove(self, wanted: Mapping[str, int], grace_s: float) -> list[str]:
        names = [f"{role}-{i}" for role in POOLS for i in range(wanted[role], self._counts[role])]
        self._stop(names, grace_s)
        self._removed.extend((time.time(), name) for name in names)
        return names

    def _stop(self, names: list[str], grace_s: float) -> None:
        """End these together; others may ask for the status meanwhile."""
        with self._lock:
            stopping = self._processes.ask_to_stop(names, grace_s)
        wait_stopped(stopping, grace_s)
        with self._lock:
            self._processes.discard(names)

    def _await(self, names: list[str], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while any(self.states()[name] != "ready" for name in names):
            late = {name: state for name, state in self.states().items() if name in names and state != "ready"}
            if time.monotonic() > deadline_s or "failed" in late.values():
                shown = ", ".join(f"{name} ({state})" for name, state in late.items())
                raise LaunchError(f"not ready within {timeout_s:g} s: {shown}", hint="twinpool logs NAME")
            time.sleep(0.1)
            self.tick()

    def _process(self, role: str, ordinal: int) -> Any:
        return role_process(self._spec, self._programs, self._paths, role, ordinal)

    def _view_of(self, supervised: Supervised) -> WorkerView | None:
        """Return the router's view of the process that runs now; what it still says of a predecessor does not count."""
        workers = self._view.workers if self._view else []
        return next((w for w in workers if w.name == supervised.process.name and w.pid == supervised.pid), None)

    def _incidents(self, table: Mapping[str, Supervised]) -> list[dict[str, Any]]:
        """Return what happened lately, newest first: exits the supervisors saw, and what the router reports."""
        now_s = time.time()
        seen = [(e.at_s, name, f"pid {e.pid} {e.words}") for name, s in table.items() for e in s.exits]
        seen += [(at_s, name, "removed by scale") for at_s, name in self._removed]
        seen += [(now_s - i.at_s_ago, i.worker, i.what) for i in (self._view.incidents if self._view else [])]
        newest = sorted(seen, reverse=True)[:NUM_INCIDENTS]
        return [{"at_s_ago": now_s - at_s, "worker": name, "what": what} for at_s, name, what in newest]


def _order(name: str) -> tuple[int, int]:
    """The router first, then each pool by its numbers."""
    role, _, ordinal = name.partition("-")
    return (ROUTER, *POOLS).index(role), int(ordinal or 0)


def _state(supervised: Supervised, view: WorkerView | None, router: RouterStatus | None) -> str:
    """One word: the supervisor's while the process is not up, else the router's."""
    if supervised.state != "running":
        return supervised.state
    if supervised.process.role == ROUTER:
        return "ready" if router is not None else "starting"
    if view is None:
        return "starting"
    return "ready" if view.is_ready else view.state


def _row(supervised: Supervised, view: WorkerView | None, router: RouterStatus | None) -> dict[str, Any]:
    exits = supervised.exits
    return {
        "name": supervised.process.name,
        "role": supervised.process.role,
        "node": supervised.host,
        "state": _state(supervised, view, router),
        "reason": supervised.reason,
        "pid": supervised.pid,
        "supervisor_pid": supervised.supervisor_pid,
        "num_restarts": supervised.num_restarts,
        "last_exit": {"at_s_ago": time.time() - exits[-1].at_s, "what": exits[-1].words} if exits else None,
        "incarnation": view.incarnation if view else None,
        "load": (view.load if view else None) or {},
    }
