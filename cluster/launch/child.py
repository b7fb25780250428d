"""Keeps one role program running as a child: starts it, watches it, restarts it, ends it with its whole group.

The child is started in its own session and inherits the read end of a pipe whose write end only this process holds:
however this process dies, the kernel closes the pipe and the child ends itself (role.py, `exit_with_parent`).
It does not know Ray, and not what the program does.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .restarts import FINAL_CODES, RestartPolicy, Restarts, describe_exit

MAX_EXITS = 32
ChildState = Literal["starting", "running", "restarting", "failed", "stopping", "stopped"]


@dataclass(frozen=True)
class ChildCommand:
    """What to run: arguments after the interpreter, and what to change in this process's environment."""

    name: str
    arguments: tuple[str, ...]
    log_path: Path
    env: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Exit:
    at_s: float  # seconds since the epoch, because it is shown and compared across processes
    pid: int
    returncode: int | None  # None: unknown, because its supervisor died
    words: str


@dataclass(frozen=True)
class ChildStatus:
    state: ChildState
    pid: int | None
    num_restarts: int
    exits: tuple[Exit, ...]
    reason: str | None  # why it failed


class ChildKeeper:
    """Runs one command until it is stopped or given up. One thread starts and awaits every incarnation of it.

    It has to be one thread that lives as long as the child: PDEATHSIG fires when the thread that spawned it ends.
    """

    def __init__(self, command: ChildCommand, policy: RestartPolicy | None = None) -> None:
        self._command = command
        self._restarts = Restarts(policy or RestartPolicy())
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._state: ChildState = "starting"
        self._pid: int | None = None
        self._num_starts = 0
        self._exits: deque[Exit] = deque(maxlen=MAX_EXITS)
        self._reason: str | None = None
        self._parent_end, self._child_end = _inheritance_pipe()
        self._thread = threading.Thread(target=self._run, name=f"keep-{command.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def status(self) -> ChildStatus:
        with self._lock:
            num_restarts = max(0, self._num_starts - 1)
            return ChildStatus(self._state, self._pid, num_restarts, tuple(self._exits), self._reason)

    def stop(self, grace_s: float) -> ChildStatus:
        """SIGTERM to the group, wait `grace_s`, SIGKILL. May be called at any time and more than once."""
        with self._lock:
            self._stopping.set()
            if self._state not in ("failed", "stopped"):
                self._state = "stopping"
        self._signal_group(signal.SIGTERM)
        self._thread.join(grace_s)
        if self._thread.is_alive():
            self._signal_group(signal.SIGKILL)
            self._thread.join(5.0)
        return self.status()

    def tail(self, num_lines: int) -> list[str]:
        return tail_lines(self._command.log_path, num_lines)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a Ray worker blocks SIGINT, and a child would inherit that
        while not self._stopping.is_set():
            try:
                delay_s = self._run_once()
            except OSError as error:
                self._give_up(f"could not be started: {error}")
                return
            if delay_s is None:
                return
            self._stopping.wait(delay_s)
        with self._lock:
            self._state = "stopped"

    def _run_once(self) -> float | None:
        """Run one incarnation to its end; return the delay before the next, None when there shall be none."""
        started_s = time.monotonic()
        process = self._spawn()
        if process is None:
            return 0.0
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # The dead leader is not reaped yet, so nobody else can have its group's number.
        _kill_group(process.pid, signal.SIGKILL)
        with self._lock:
            self._pid = None
            returncode = process.wait()
            words = describe_exit(returncode)
            self._exits.append(Exit(time.time(), process.pid, returncode, words))
            if self._stopping.is_set():
                return 0.0
        return self._after_death(returncode, words, time.monotonic() - started_s)

    def _after_death(self, returncode: int, words: str, lifetime_s: float) -> float | None:
        self._note(words)
        if returncode in FINAL_CODES:
            self._give_up(words)
            return None
        delay_s = self._restarts.died(time.monotonic(), lifetime_s)
        if delay_s is None:
            self._give_up(f"died too often, last: {words}")
            return None
        with self._lock:
            self._state = "stopping" if self._stopping.is_set() else "restarting"
        return delay_s

    def _spawn(self) -> "subprocess.Popen[bytes] | None":
        """Start the child unless a stop came first; under the lock, so that a stop never misses a new child."""
        with self._lock:
            if self._stopping.is_set():
                return None
            with self._command.log_path.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", *self._command.arguments, "--parent-fd", str(self._child_end)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=child_environment(self._command.env),
                    start_new_session=True,
                    pass_fds=(self._child_end,),
                )
            self._pid = process.pid
            self._num_starts += 1
            self._state = "running"
            return process

    def _signal_group(self, number: signal.Signals) -> None:
        with self._lock:
            if self._pid is not None:
                _kill_group(self._pid, number)

    def _give_up(self, reason: str) -> None:
        self._note(f"given up: {reason}")
        with self._lock:
            self._state = "failed"
            self._reason = reason

    def _note(self, line: str) -> None:
        """Write a line of our own into the child's log; a full disk must not end the supervision."""
        with contextlib.suppress(OSError), self._command.log_path.open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} twinpool: {self._command.name} {line}\n")


def child_environment(changes: dict[str, str]) -> dict[str, str]:
    """This process's environment without Ray's own variables (its token's path among them), plus `changes`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return inherited | changes


def tail_lines(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log without reading more than its end."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - 512 * num_lines))
            lines: Sequence[bytes] = log.read().splitlines()
    except FileNotFoundError:
        return []
    return [line.decode(errors="replace") for line in lines[-num_lines:]] if num_lines else []


def _inheritance_pipe() -> tuple[int, int]:
    child_end, parent_end = os.pipe()
    return parent_end, child_end


def _kill_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
