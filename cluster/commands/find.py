"""Finds the running cluster that a command is about, and asks its launcher."""

from dataclasses import dataclass
from typing import Any

from ..launch.control import ask
from ..launch.run_state import RunFolder, RunState, running_names
from ..protocol.errors import LaunchError

STATUS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RunningCluster:
    folder: RunFolder
    state: RunState

    def ask(self, request: str, timeout_s: float, arguments: dict[str, Any] | None = None) -> Any:
        """Send its launcher one request. Raises LaunchError."""
        return ask(self.state.control_socket, request, timeout_s, arguments)

    def status(self) -> dict[str, Any]:
        return self.ask("status", STATUS_TIMEOUT_S)


def pick_name(name: str | None) -> str | None:
    """Return the name that is meant: the one given, else the only one running, None when none runs."""
    if name is not None:
        return name
    running = running_names()
    if len(running) > 1:
        raise LaunchError(f"several clusters run: {', '.join(running)}", hint="choose one with --name")
    return running[0] if running else None


def find_cluster(name: str | None) -> RunningCluster:
    """Return the running cluster of that name, or the only one. Raises LaunchError when there is none."""
    picked = pick_name(name)
    folder = RunFolder(picked) if picked is not None else None
    if folder is None or not folder.is_running():
        called = f" named {name}" if name else ""
        others = [other for other in running_names() if other != name]
        hint = f"running: {', '.join(others)}" if others else "`twinpool up` starts one"
        raise LaunchError(f"no cluster{called} is running", hint=hint)
    state = folder.read_state()
    if state is None:
        raise LaunchError(f"the cluster {folder.name} is just starting", hint="ask again in a second")
    return RunningCluster(folder, state)
