"""The launcher: one process per cluster that starts Ray and the roles, watches them, and ends them all.

`twinpool up` starts it (start.py) and reads its events; it then lives until it is told to stop, by a signal, over the
control socket, or because whoever started it in the foreground is gone. No request ever passes through it.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ClusterSpec, load_spec
from ..protocol.errors import LaunchError, TwinpoolError
from . import ray_session
from .control import ControlServer
from .events import Event
from .lifeline import hold
from .placement import check_demand
from .pools import Pools
from .roles import POOLS, Programs, RunPaths
from .router_view import RouterView
from .run_state import RunFolder, RunState
from .stop_request import StopRequest

STARTING_TICK_S = 0.1
TICK_S = 1.0
NUM_LOG_LINES = 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LauncherOptions:
    """What `twinpool up` decided before it started the launcher."""

    spec_file: Path
    run_id: str
    socket_folder: Path
    address: str
    is_detached: bool
    timeout_s: float
    stop_grace_s: float
    programs: Programs


class Launcher:
    """One cluster's life, from start to stop."""

    def __init__(self, options: LauncherOptions, emit: Callable[[Event], None]) -> None:
        self._options = options
        self._emit = emit
        self._spec: ClusterSpec = load_spec(options.spec_file)
        self._folder = RunFolder(self._spec.name)
        self._started_s = time.monotonic()
        self._stop = StopRequest()
        self._hurry = StopRequest()  # running requests are not waited for
        self._exit_code = 0
        self._stop_grace_s = options.stop_grace_s
        self._is_ready = False
        self._pools: Pools | None = None
        self._model_folder: Path | None = None
        self._model_known = threading.Event()
        self._endpoint = self._spec.router.url

    def run(self) -> int:
        """Run until stopped; returns the exit code. Everything started is ended on every way out."""
        self._catch_signals()
        self._folder.write_state(self._state())
        control = ControlServer(self._state().control_socket, self._handlers())
        threading.Thread(target=self._read_starter, name="starter", daemon=True).start()
        try:
            self._serve()
        except TwinpoolError as error:
            self._fail(error)
        finally:
            ray_session.disconnect()
            control.close()
            self._folder.clean_up()
            self._emit(Event(kind="stopped", elapsed_s=self._elapsed_s()))
        return self._exit_code

    def _serve(self) -> None:
        self._connect_ray()
        self._await_model()
        if self._stop.is_set():
            return
        lifeline = hold(self._paths().lifeline)
        router = RouterView(self._paths().admin_socket, self._endpoint)
        pools = self._pools = Pools(self._spec, self._options.programs, self._paths(), router)
        try:
            pools.start_all()
            self._await_ready(pools)
            while not self._stop.wait(TICK_S):
                pools.tick()
        except TwinpoolError as error:
            self._fail(error)  # said before the end, which takes its time
            if not self._is_ready:
                self._hurry.set()
        finally:
            pools.stop_all(self._stop_grace_s, self._hurry.is_set)
            router.close()
            lifeline.close()

    def _fail(self, error: TwinpoolError) -> None:
        logger.error("%s", error)
        self._exit_code = 1
        self._emit(Event(kind="failed", message=error.message, hint=error.hint))

    def _connect_ray(self) -> None:
        options = self._options
        ray_session.connect(options.address, f"twinpool-{self._spec.name}", options.socket_folder / "ray")
        self._catch_signals()  # Ray puts its own handler in place
        self._emit(Event(kind="ray", state=options.address, elapsed_s=self._elapsed_s()))
        local, _ = ray_session.nodes()
        check_demand(Pools.demands(self._spec), local)

    def _await_model(self) -> None:
        while not self._model_known.wait(STARTING_TICK_S):
            if self._stop.is_set():
                return

    def _await_ready(self, pools: Pools) -> None:
        """Report each process as it comes up; returns when all are ready or a stop was asked for."""
        deadline_s = time.monotonic() + self._options.timeout_s
        shown: dict[str, str] = {}
        while not self._stop.is_set():
            pools.tick()
            states = pools.states()
            for name, state in states.items():
                if shown.get(name) != state:
                    self._emit(Event(kind="process", name=name, state=state, elapsed_s=self._elapsed_s()))
            shown = states
            if pools.is_ready():
                self._is_ready = True
                self._emit(Event(kind="ready", message=self._endpoint, elapsed_s=self._elapsed_s()))
                return
            failed = [name for name, state in states.items() if state == "failed"]
            if failed or time.monotonic() > deadline_s:
                raise self._not_ready(pools, failed)
            self._stop.wait(STARTING_TICK_S)

    def _not_ready(self, pools: Pools, failed: list[str]) -> LaunchError:
        states = pools.states()
        late = failed or [name for name, state in states.items() if state != "ready"]
        for name in late:
            logs = {name: pools.tail(name, NUM_LOG_LINES)}
            self._emit(Event(kind="process", name=name, state=states[name], logs=logs))
        shown = ", ".join(f"{name} {states[name]}" + (f" ({r})" if (r := pools.reason(name)) else "") for name in late)
        if failed:
            return LaunchError(f"the cluster could not start: {shown}", hint=f"the logs are in {self._folder.logs}")
        waited = f"within {self._options.timeout_s:g} s"
        return LaunchError(
            f"the cluster was not ready {waited}: {shown or 'the router does not answer /health/ready'}",
            hint=f"the logs are in {self._folder.logs}; --timeout gives it longer",
        )

    def _handlers(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {"status": self._answer_status, "scale": self._answer_scale, "down": self._answer_down}

    def _answer_status(self, _: dict[str, Any]) -> dict[str, Any]:
        about: dict[str, Any] = {**self._state().model_dump(), "uptime_s": self._elapsed_s()}
        if self._pools is None:
            return {**about, "state": "starting", "processes": [], "incidents": [], "router": None}
        answer = {**about, **self._pools.status()}
        if self._stop.is_set():
            return {**answer, "state": "stopping"}
        return answer if self._is_ready else {**answer, "state": "starting"}

    def _answer_scale(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._pools is None or not self._is_ready:
            raise LaunchError("the cluster is still starting", hint="scale it once it is ready")
        counts = {role: int(arguments[role]) for role in POOLS if arguments.get(role) is not None}
        changed = self._pools.scale(counts, float(arguments["timeout_s"]))
        return {**changed, **self._answer_status({})}

    def _answer_down(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._stop_grace_s = float(arguments["grace_s"])
        if arguments["is_now"]:
            self._hurry.set()
        self._stop.set()
        return {"launcher_pid": os.getpid()}

    def _read_starter(self) -> None:
        """Learn the model's folder from whoever started us; its end of the pipe closing means that it is gone."""
        line = sys.stdin.readline()
        if line.strip():
            self._model_folder = Path(line.strip())
            self._model_known.set()
            sys.stdin.readline()
        if not (self._options.is_detached and self._is_ready):
            self._stop.set()

    def _catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        """Stop; asked again, stop without waiting for running requests."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _paths(self) -> RunPaths:
        assert self._model_folder is not None, "the model's folder is not known yet"
        options = self._options
        return RunPaths(options.run_id, options.spec_file, self._model_folder, options.socket_folder, self._folder.logs)

    def _state(self) -> RunState:
        return RunState(
            name=self._spec.name,
            run_id=self._options.run_id,
            endpoint=self._endpoint,
            model_name=self._spec.model_name,
            ray_address=self._options.address,
            launcher_pid=os.getpid(),
            socket_folder=str(self._options.socket_folder),
            started_at_s=time.time() - self._elapsed_s(),
        )
