"""Starts a launcher process and follows it until its cluster is ready. Used by `twinpool up`; does not import Ray.

The model is fetched here, while the launcher starts Ray: fetching may draw a progress bar on the user's terminal.
"""

import contextlib
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..config import ClusterSpec, RouterSpec, absolute_model
from ..cost_profile import load_profile
from ..protocol.errors import LaunchError
from ..protocol.keys import load_keys
from .child import tail_lines
from .events import Event
from .ray_session import EMBEDDED
from .roles import POOLS, ROUTER, Programs
from .run_state import RUN_VARIABLE, RunFolder, make_socket_folder

LAUNCHER_LOG = "launcher.log"
LAUNCHER_PATIENCE_S = 30.0  # beyond its own time-out, which counts only from when Ray is there


@dataclass(frozen=True)
class UpOptions:
    spec: ClusterSpec
    address: str = EMBEDDED
    is_detached: bool = False
    timeout_s: float = 120.0
    stop_grace_s: float = 10.0
    programs: Programs = field(default_factory=Programs)


@dataclass(frozen=True)
class StartedLauncher:
    """A launcher process of ours. Closing its standard input tells it that we are gone."""

    spec: ClusterSpec
    folder: RunFolder
    process: "subprocess.Popen[bytes]"
    socket_folder: Path
    events_fd: int

    def follow(self, patience_s: float | None = None) -> Iterator[Event]:
        """Yield its events until it ends. Raises LaunchError when none comes for `patience_s`, if given."""
        waiting = select.poll()
        waiting.register(self.events_fd, select.POLLIN)
        received = b""
        while waiting.poll(None if patience_s is None else patience_s * 1000):
            chunk = os.read(self.events_fd, 65536)
            if not chunk:
                return
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                yield Event.model_validate_json(line)
        raise LaunchError(
            f"the launcher has said nothing for {patience_s or 0:g} s", hint="is the Ray of --address well?"
        )

    def stop(self, patience_s: float) -> None:
        """End it and everything it started, politely first. Safe to call when it is gone already."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.clean_up()
        shutil.rmtree(self.socket_folder, ignore_errors=True)

    def hurry(self) -> None:
        """Tell a launcher that is stopping to end running requests at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def release(self) -> None:
        """Let go of its pipes; a detached launcher lives on, another one stops."""
        if self.process.stdin:
            self.process.stdin.close()
        os.close(self.events_fd)


def start_launcher(options: UpOptions) -> StartedLauncher:
    """Check what can be checked at once, then start the launcher. Raises LaunchError."""
    folder = RunFolder(options.spec.name)
    lock = folder.claim()
    try:
        folder.clean_up()
        spec = _with_keys(_with_paths(_with_port(options.spec)))
        shutil.rmtree(folder.logs, ignore_errors=True)
        folder.logs.mkdir(parents=True)
        folder.spec.write_text(spec.model_dump_json(indent=2))
        return _spawn(options, spec, folder, lock)
    finally:
        os.close(lock)  # the launcher holds it now


def await_ready(launcher: StartedLauncher, options: UpOptions, show: Callable[[Event], None]) -> None:
    """Fetch the model, hand it over, and show what happens until the cluster is ready. Raises LaunchError."""
    model_folder = fetch_model(options.spec.model, options.programs)
    assert launcher.process.stdin is not None, "the launcher is started with a pipe"
    with contextlib.suppress(BrokenPipeError):  # it ended already: its last event says why
        launcher.process.stdin.write(f"{model_folder}\n".encode())
        launcher.process.stdin.flush()
    for event in launcher.follow(options.timeout_s + LAUNCHER_PATIENCE_S):
        show(event)
        if event.kind == "ready":
            return
        if event.kind == "failed":
            raise LaunchError(event.message, hint=event.hint)
    log = launcher.folder.logs / LAUNCHER_LOG
    last = "\n".join(tail_lines(log, 5))
    raise LaunchError(f"the launcher ended before the cluster was ready\n{last}".rstrip(), hint=f"its log is {log}")


def fetch_model(model: str, programs: Programs) -> Path:
    """Run the program that fetches a model; its progress goes to our standard error. Raises LaunchError."""
    is_terminal = sys.stderr.isatty()
    done = subprocess.run(
        [sys.executable, "-P", "-m", programs.fetch, model],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if is_terminal else subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return Path(lines[-1]).absolute()
    said = "" if is_terminal else f": {done.stderr.rpartition('error: ')[2].strip()}"  # without the progress before it
    raise LaunchError(f"the model {model} could not be fetched{said}")


def _spawn(options: UpOptions, spec: ClusterSpec, folder: RunFolder, lock: int) -> StartedLauncher:
    socket_folder = make_socket_folder()
    run_id = secrets.token_hex(8)
    events_fd, launcher_end = os.pipe()
    arguments = [
        *("--spec", str(folder.spec), "--run-id", run_id, "--socket-folder", str(socket_folder)),
        *("--address", options.address, "--token-file", str(folder.path / "ray-token")),
        *("--lock-fd", str(lock), "--events-fd", str(launcher_end)),
        *("--timeout", str(options.timeout_s), "--stop-grace", str(options.stop_grace_s)),
        *("--programs", options.programs.to_json()),
        *(["--detached"] if options.is_detached else []),
    ]
    with (folder.logs / LAUNCHER_LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}", *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | {RUN_VARIABLE: run_id},
            start_new_session=True,
            pass_fds=(lock, launcher_end),
        )
    os.close(launcher_end)
    return StartedLauncher(spec, folder, process, socket_folder, events_fd)


def _with_port(spec: ClusterSpec) -> ClusterSpec:
    """Return the spec with a port that is free now; port 0 becomes a real one."""
    with socket.socket(socket.AF_INET6 if ":" in spec.router.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((spec.router.host, spec.router.port))
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {spec.router.host}:{spec.router.port}: {error.strerror}",
                hint="choose another port with --port, or --port 0 for any free one",
            ) from error
        router = RouterSpec(**{**spec.router.model_dump(), "port": probe.getsockname()[1]})
    return spec.model_copy(update={"router": router})


def _with_keys(spec: ClusterSpec) -> ClusterSpec:
    """Return the spec with the full path of its keys. Raises ConfigError when a process of it would find none."""
    if spec.security.keys_folder is None:
        return spec
    folder = Path(spec.security.keys_folder).expanduser().absolute()
    sizes = {"prompt": spec.prompt.num_workers, "completion": spec.completion.num_workers}
    for name in [ROUTER, *(f"{role}-{i}" for role in POOLS for i in range(sizes[role]))]:
        load_keys(folder, name)
    security = spec.security.model_copy(update={"keys_folder": str(folder)})
    return spec.model_copy(update={"security": security})


def _with_paths(spec: ClusterSpec) -> ClusterSpec:
    """Return the spec with full paths, for those who read it elsewhere. Raises ConfigError for costs that are none."""
    router = spec.router
    if router.api_keys_file is not None:
        router = router.model_copy(update={"api_keys_file": str(Path(router.api_keys_file).expanduser().absolute())})
    if router.chat_template is not None:
        router = router.model_copy(update={"chat_template": str(Path(router.chat_template).expanduser().absolute())})
    if router.costs is not None:
        path = Path(router.costs).expanduser().absolute()
        load_profile(path)
        router = router.model_copy(update={"costs": str(path)})
    return spec.model_copy(update={"model": absolute_model(spec.model), "router": router})
