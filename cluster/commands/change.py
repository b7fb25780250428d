"""`twinpool scale` and `twinpool down`: change a running cluster, or end it."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from ..config import load_spec
from ..launch.run_state import RunFolder
from ..protocol.errors import LaunchError
from .find import find_cluster, pick_name

DOWN_MARGIN_S = 35.0  # beyond drain and grace: the router's own end, Ray's, and the sweep
LOOK_S = 0.5
KILLED_WITHIN_S = 5.0


def scale(name: str | None, counts: dict[str, int], timeout_s: float) -> dict[str, Any]:
    """Change the pool sizes and wait for it; returns what was added and removed, and the new status."""
    if not counts:
        raise LaunchError("nothing to scale", hint="give --prompt-workers N, --completion-workers M or both")
    cluster = find_cluster(name)
    return cluster.ask("scale", 2 * timeout_s + 10.0, {**counts, "timeout_s": timeout_s})


def down(name: str | None, grace_s: float, is_now: bool, show: Callable[[str], None]) -> dict[str, Any]:
    """End a cluster and sweep what a dead one left; that none runs is not an error.

    Running requests may finish, unless `is_now`; `show` is told what is waited for.
    """
    folder = RunFolder(pick_name(name) or "twinpool")
    was_running = folder.is_running()
    if was_running:
        drain_s = load_spec(folder.spec).router.drain_s
        _ask_to_stop(folder, grace_s, is_now)
        progress = Progress(folder, drain_s, show)
        if not _wait_until_free(folder, drain_s + grace_s + DOWN_MARGIN_S, progress.look):
            _kill_launcher(folder)
    num_killed = 0 if folder.is_running() else folder.clean_up()
    return {"name": folder.name, "was_running": was_running, "num_leftovers_killed": num_killed}


class Progress:
    """Tells how many requests still run, each time that the number changes."""

    def __init__(self, folder: RunFolder, drain_s: float, show: Callable[[str], None]) -> None:
        self._folder = folder
        self._drain_s = drain_s
        self._show = show
        self._num_running = 0
        self._next_look_s = 0.0

    def look(self) -> None:
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + LOOK_S
        try:
            router = find_cluster(self._folder.name).status()["router"]
        except LaunchError:  # it is ending
            return
        num_running = router["running"] + router["queued"] if router is not None else 0
        if num_running != self._num_running and num_running:
            self._show(f"{num_running} requests may finish, within {self._drain_s:g} s; `down --now` ends them")
        self._num_running = num_running


def _ask_to_stop(folder: RunFolder, grace_s: float, is_now: bool) -> None:
    try:
        find_cluster(folder.name).ask("down", 5.0, {"grace_s": grace_s, "is_now": is_now})
    except LaunchError:  # too early or too late for an answer; a signal does the same
        _signal_launcher(folder, signal.SIGTERM)


def _kill_launcher(folder: RunFolder) -> None:
    """End a launcher that does not end; everything it started dies with it."""
    _signal_launcher(folder, signal.SIGKILL)
    if not _wait_until_free(folder, KILLED_WITHIN_S, lambda: None):
        raise LaunchError(f"the cluster {folder.name} does not end", hint=f"its logs are in {folder.logs}")


def _signal_launcher(folder: RunFolder, number: signal.Signals) -> None:
    state = folder.read_state()
    if state is not None and folder.is_running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.launcher_pid, number)


def _wait_until_free(folder: RunFolder, timeout_s: float, look: Callable[[], None]) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while folder.is_running():
        if time.monotonic() > deadline_s:
            return False
        look()
        time.sleep(0.05)
    return True
