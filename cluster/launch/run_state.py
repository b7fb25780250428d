"""Where a running cluster is written down: one folder per cluster name, held by a lock while its launcher lives.

    <cache>/runs/<name>/lock        locked by the launcher; the kernel frees it however the launcher dies
    <cache>/runs/<name>/state.json  how to reach it; stale when nobody holds the lock
    <cache>/runs/<name>/spec.json   the spec every role reads
    <cache>/runs/<name>/ray-token  of the embedded Ray, readable by this user only
    <cache>/runs/<name>/logs/       one file per process; they stay after `down` until the next `up`

Sockets live elsewhere, in a short private folder, because their paths may not exceed about 100 characters.
It does not know Ray.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ..config import cache_folder
from ..protocol.errors import LaunchError

RUN_VARIABLE = "TWINPOOL_RUN"  # in the environment of every process of a run: that is how leftovers are found
MAX_SOCKET_FOLDER = 60  # characters; leaves room for Ray's own socket names below it


class RunState(BaseModel):
    """What `status`, `logs`, `scale`, `chat` and `down` need to reach a cluster."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    run_id: str
    endpoint: str
    model_name: str
    ray_address: str
    launcher_pid: int
    socket_folder: str
    started_at_s: float

    @property
    def control_socket(self) -> Path:
        return Path(self.socket_folder) / "launcher.sock"

    @property
    def admin_socket(self) -> Path:
        """The router's, where probes are asked for."""
        return Path(self.socket_folder) / "admin.sock"


@dataclass(frozen=True)
class RunFolder:
    name: str

    @property
    def path(self) -> Path:
        return cache_folder().absolute() / "runs" / self.name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    def claim(self) -> int:
        """Take the lock of this name and return its descriptor. Raises LaunchError when a launcher holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise self._already_runs() from None
        return descriptor

    def is_running(self) -> bool:
        """Whether a launcher holds the lock."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def read_state(self) -> RunState | None:
        """Return what the launcher wrote down, alive or not; None when there is nothing readable."""
        try:
            return RunState.model_validate_json(self.state.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write_state(self, state: RunState) -> None:
        partial = self.state.with_suffix(".partial")
        partial.write_text(state.model_dump_json(indent=2))
        partial.replace(self.state)

    def clean_up(self) -> int:
        """Remove what a dead launcher left: processes, sockets, state. Returns how many processes had to be killed.

        Only for whoever holds the lock, or has seen that nobody does.
        """
        state = self.read_state()
        if state is None:
            self.state.unlink(missing_ok=True)
            return 0
        num_killed = kill_leftovers(state)
        if Path(state.socket_folder).name.startswith("tp-"):
            shutil.rmtree(state.socket_folder, ignore_errors=True)
        self.state.unlink(missing_ok=True)
        return num_killed

    def _already_runs(self) -> LaunchError:
        state = self.read_state()
        where = f" at {state.endpoint} (launcher {state.launcher_pid})" if state else ""
        return LaunchError(
            f"a cluster named {self.name} already runs{where}",
            hint=f"`twinpool down --name {self.name}` stops it; `--name` starts another beside it",
        )


def running_names() -> list[str]:
    """Names of the clusters of this user that have a living launcher."""
    runs = cache_folder().absolute() / "runs"
    if not runs.is_dir():
        return []
    return sorted(folder.name for folder in runs.iterdir() if RunFolder(folder.name).is_running())


def make_socket_folder() -> Path:
    """Create a private folder (0700) with a short path."""
    parent = tempfile.gettempdir()
    if len(parent) > MAX_SOCKET_FOLDER - 12:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="tp-", dir=parent))


def leftovers(state: RunState) -> list[int]:
    """Return what is left of a run besides its launcher: by the mark in the environment, or by the launcher's session.

    Ray's processes overwrite the memory that their environment is read from, but stay in the session.
    """
    mark = f"{RUN_VARIABLE}={state.run_id}".encode()
    # The launcher is dead; a living process with its number can exist only if its session has ended.
    is_reused = state.launcher_pid != os.getpid() and _session_of(state.launcher_pid) is not None
    session = None if is_reused else state.launcher_pid
    return [pid for pid in _own_processes() if _has_mark(pid, mark) or (session and _session_of(pid) == session)]


def kill_leftovers(state: RunState, patience_s: float = 5.0) -> int:
    """SIGKILL what is left of a run and wait until it is gone; returns how many there were."""
    seen: set[int] = set()
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        alive = leftovers(state)
        if not alive:
            break
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        seen.update(alive)
        time.sleep(0.05)
    return len(seen)


def _own_processes() -> list[int]:
    """Return this user's living processes but this one."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # gone meanwhile
            if entry.name.isdigit() and int(entry.name) != os.getpid() and entry.stat().st_uid == os.getuid():
                found.append(int(entry.name))
    return found


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _session_of(pid: int) -> int | None:
    """Return a living process's session; None when it is gone or only waits to be reaped."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:4]
    except OSError:
        return None
    return None if state == "Z" else int(session)
