"""Runs the `twinpool` command with stand-ins for the roles, and checks that no process outlives a test."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from twinpool.cluster.launch.control import ask
from twinpool.cluster.launch.run_state import RunState

Eventually = Callable[[Callable[[], object], float], None]
COMMAND = (sys.executable, "-P", "-m", "stand_ins.cli")


def wait_until(condition: Callable[[], object], within_s: float) -> None:
    """Return as soon as `condition()` is true; fail when it is not within the time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not true within {within_s:g} s"
        time.sleep(0.02)


@dataclass(frozen=True)
class CommandLine:
    """A user of the command with a cache and a temporary folder of their own."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def run(self, *arguments: str, stdin: str = "", timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        command = [*COMMAND, *arguments]
        return subprocess.run(
            command,
            env=self._environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command. It hears SIGINT even when the suite, started in the background, does not."""
        pipe, environment = subprocess.PIPE, self._environment()
        hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(
            [*COMMAND, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=hears
        )

    def up(self, *arguments: str) -> dict[str, Any]:
        """Start a detached cluster and return what `up --json` says."""
        done = self.run("up", "--detach", "--json", "--port", "0", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def status(self, name: str = "twinpool") -> dict[str, Any]:
        """Ask the launcher directly, as `twinpool status` does, without the cost of a new process."""
        state = RunState.model_validate_json((self.cache / "runs" / name / "state.json").read_bytes())
        return ask(state.control_socket, "status", 5.0)

    def row(self, process: str) -> dict[str, Any]:
        return next(row for row in self.status()["processes"] if row["name"] == process)

    def spec(self, text: str) -> str:
        """Write a spec file and return its path."""
        path = self.folder / "spec.yaml"
        path.write_text(text)
        return str(path)

    def processes(self) -> list[str]:
        """Return the command lines of all processes that this user started, daemons included.

        Ray's daemons hide their environment; they are known by the files they hold open.
        """
        mark = f"TWINPOOL_CACHE={self.cache}".encode()
        found: list[str] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = mark in (entry / "environ").read_bytes().split(b"\0")
                    files = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
                    if marked or any(file.startswith(f"{self.folder}/") for file in files):
                        found.append(f"{entry.name} {(entry / 'cmdline').read_bytes().decode()}")
                except OSError:  # gone meanwhile
                    continue
        return found

    def _environment(self) -> dict[str, str]:
        here = Path(__file__).parent
        mine = {"TWINPOOL_CACHE": str(self.cache), "TMPDIR": str(self.folder), "PYTHONPATH": str(here)}
        return os.environ | mine | self.env


def make_command_line() -> Iterator[CommandLine]:
    folder = Path(tempfile.mkdtemp(prefix="tpt-", dir="/tmp"))  # short: sockets are made below it
    user = CommandLine(folder)
    try:
        yield user
        runs = user.cache / "runs"
        for name in sorted(path.name for path in runs.iterdir()) if runs.is_dir() else []:
            assert user.run("down", "--name", name).returncode == 0
        wait_until(lambda: not user.processes(), 3.0)
        assert not list(folder.glob("tp-*")), "a socket folder was left behind"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def user() -> Iterator[CommandLine]:
    """A user of the command; at the end nothing of theirs may be left running."""
    yield from make_command_line()


@pytest.fixture(scope="module")
def cluster_user() -> Iterator[CommandLine]:
    """A user with a running cluster, shared by the tests of a module; they put back what they change."""
    for user in make_command_line():
        user.up()
        yield user


@pytest.fixture
def eventually() -> Eventually:
    return wait_until
