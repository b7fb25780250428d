"""A real cluster of real processes on loopback, without Ray: what end-to-end tests and benchmarks drive.

With several routers, all serve the same workers; `at` gives the cluster as the clients of one of them see it.
`LiveCluster` starts the role programs as the launcher does, waits until they are ready, and at the end asserts what
must hold after every run: all blocks free or cached, nothing running, every process ended by itself, and none has run
code that it found in data (see audited/sitecustomize.py).
"""

import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from twinpool.cluster.config import ClusterSpec

AUDITED = Path(__file__).parent / "audited"
MODULES = {"router": "router", "prompt": "prefill_worker", "completion": "decode_worker"}


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return `condition`'s first true value; fails naming `what` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


class LiveCluster:
    def __init__(self, model_folder: Path, spec: dict[str, Any], num_routers: int = 1) -> None:
        self.model_folder = model_folder
        self.folder = Path(tempfile.mkdtemp(prefix="twinpool-"))  # short: it holds ipc sockets
        self.router_names = ["router", *(f"router-{i}" for i in range(1, num_routers))]
        self.programs: dict[str, list[str]] = {}  # what python runs in place of a role's module: see faulty_role
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = [free_port() for _ in self.router_names]
        for name, port in zip(self.router_names, self._ports, strict=True):
            pools = {pool: _poisoned(spec.get(pool, {})) for pool in ("prompt", "completion")}
            whole = {**spec, **pools, "router": {**spec.get("router", {}), "port": port}}
            (self.folder / f"spec{_tag(name)}.json").write_text(ClusterSpec.model_validate(whole).model_dump_json())
        self._views = [self, *(copy.copy(self) for _ in self.router_names[1:])]
        for router, view in enumerate(self._views):
            view._look_through(router)

    def at(self, router: int) -> "LiveCluster":
        """Return this same cluster as seen through that router."""
        return self._views[router]

    def _look_through(self, router: int) -> None:
        self.router_name = self.router_names[router]
        tag = _tag(self.router_name)
        self.spec = ClusterSpec.model_validate_json((self.folder / f"spec{tag}.json").read_text())
        self.url = f"http://127.0.0.1:{self._ports[router]}"
        self.model = self.spec.model_name
        self.client = httpx.Client(base_url=self.url, timeout=600.0)  # a slow suite computes for minutes
        self._admin = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.folder / f"admin{tag}.sock")))

    @property
    def names(self) -> list[str]:
        prompts = [f"prompt-{i}" for i in range(self.spec.prompt.num_workers)]
        return [*self.router_names, *prompts, *(f"completion-{i}" for i in range(self.spec.completion.num_workers))]

    def __enter__(self) -> "LiveCluster":
        for name in self.names:
            self.start(name)
        try:
            self.wait_ready()
        except BaseException:
            sys.stderr.write(self.logs())
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for view in self._running_views():
                    view.wait_idle()
        finally:
            if kind is not None:
                sys.stderr.write(self.logs())
            noted = self.audited()
            codes = self.close()
        assert kind is not None or set(codes.values()) == {0}, f"exit codes {codes}"
        assert kind is not None or noted == [], f"a process ran what was not there when it started: {noted}"

    def program(self, name: str) -> list[str]:
        """Return what python is told to run as `name`."""
        return self.programs.get(name, ["-m", f"twinpool.{MODULES[name.split('-')[0]]}"])

    def control_address(self, name: str) -> str:
        """Return what a router binds, or where a worker finds all routers."""
        routers = [name] if name in self.router_names else self.router_names
        return ",".join(f"ipc://{self.folder}/control{_tag(router)}.sock" for router in routers)

    def arguments(self, name: str) -> list[str]:
        is_router = name in self.router_names
        tag = _tag(name) if is_router else ""
        return [
            *("--spec", str(self.folder / f"spec{tag}.json"), "--model-folder", str(self.model_folder)),
            *("--control", self.control_address(name), "--run-folder", str(self.folder), "--name", name),
            *(("--admin-socket", str(self.folder / f"admin{tag}.sock")) if is_router else ()),
        ]

    def start(self, name: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(AUDITED), environment.get("PYTHONPATH")]))
        environment["TWINPOOL_AUDIT_FOLDER"] = str(self.folder)
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, *self.program(name), *self.arguments(name)]
            self.processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=self.folder
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal; after SIGKILL the process is reaped."""
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(10)

    def status(self) -> dict[str, Any]:
        status = self._admin.get("http://admin/status").raise_for_status().json()
        for worker in status["workers"]:
            if worker["load"] is not None:
                self._audit(worker["pid"])
        return status

    def audited(self) -> list[str]:
        """Return what was noted of processes that were ready."""
        return [line for path in self.folder.glob("*.audit") for line in path.read_text().splitlines()]

    def _audit(self, pid: int) -> None:
        (self.folder / f"{pid}.ready").touch()

    def worker(self, name: str) -> dict[str, Any] | None:
        """Return the router's view of one worker, or None when it is not there."""
        return next((worker for worker in self.status()["workers"] if worker["name"] == name), None)

    def wait_ready(self, timeout_s: float = 100.0) -> None:
        for view in self._running_views():
            wait_until(lambda v=view: v.is_ready() and v._has_all_workers(), timeout_s, f"{view.router_name} ready")
            self._audit(self.processes[view.router_name].pid)

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing runs and every block is free or cached on every worker, in heartbeats newer than now."""
        began_s = time.monotonic()

        def is_idle_since_then() -> bool:
            status = self.status()
            oldest_s = max((worker["last_heartbeat_s"] for worker in status["workers"]), default=0.0)
            return is_idle(status) and time.monotonic() - oldest_s > began_s

        wait_until(is_idle_since_then, timeout_s, f"idle: {json.dumps(self.status(), indent=1)}")

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """Send one completion, not streamed; return the body. Fails for any status but 200."""
        response = self.client.post("/v1/completions", json={"model": self.model, "prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, prompt: str | list[int], **fields: Any) -> Iterator[dict[str, Any]]:
        """Send one streamed completion; yield its chunks up to [DONE]."""
        body = {"model": self.model, "prompt": prompt, "stream": True, **fields}
        with (
            httpx.Client(base_url=self.url, timeout=120.0) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    def close(self) -> dict[str, int]:
        """Stop everything and remove the folder; return the exit codes."""
        codes = self.stop()
        for view in self._views:
            view.client.close()
            view._admin.close()
        shutil.rmtree(self.folder)
        return codes

    def logs(self) -> str:
        return "".join(f"--- {path.name}\n{path.read_text()[-3000:]}\n" for path in sorted(self.folder.glob("*.log")))

    def stop(self) -> dict[str, int]:
        """End every process by SIGTERM, the routers first; return the exit codes. One that does not end is killed."""
        self._ask_to_end(self.router_names)
        for name in self.router_names:
            if name in self.processes:
                _reap(self.processes[name])
        self._ask_to_end(self.names[len(self.router_names) :])
        return {name: _reap(process) for name, process in self.processes.items()}

    def _ask_to_end(self, names: list[str]) -> None:
        for name in names:
            if name in self.processes and self.processes[name].poll() is None:
                self.processes[name].send_signal(signal.SIGCONT)
                self.processes[name].send_signal(signal.SIGTERM)

    def is_listening(self) -> bool:
        try:
            return self.client.get("/health/live").status_code == 200
        except httpx.TransportError:
            return False

    def is_ready(self) -> bool:
        dead = [name for name, process in self.processes.items() if process.poll() is not None]
        assert not dead, f"{dead} ended\n{self.logs()}"
        return self.is_listening() and self.client.get("/health/ready").status_code == 200

    def _has_all_workers(self) -> bool:
        workers = [worker for worker in self.status()["workers"] if worker["load"] is not None]
        return len(workers) == len(self.names) - len(self.router_names)

    def _running_views(self) -> list["LiveCluster"]:
        return [view for view in self._views if self.processes[view.router_name].poll() is None]


def _tag(router: str) -> str:
    """Return what tells this router's files from the first one's."""
    return router.removeprefix("router")


def open_stream(cluster: LiveCluster, receive_bytes: int | None = None, **fields: Any) -> socket.socket:
    """Send a streamed completion; return the connection without reading from it."""
    body = json.dumps({"stream": True, **fields}).encode()
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", int(cluster.url.rpartition(":")[2])))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def read_events(connection: socket.socket, num_events: int | None = None, data: bytes = b"") -> bytes:
    """Read on behind `data` to that many events, or to the end of the answer; return all. Fails when it is cut off."""
    while not (data.endswith(b"\r\n0\r\n\r\n") if num_events is None else data.count(b"data: ") >= num_events):
        received = connection.recv(65536)
        assert received, data[-500:]
        data += received
    return data


def events_in(data: bytes) -> list[bytes]:
    return [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]


def open_things(cluster: LiveCluster) -> dict[str, tuple[int, int, int]]:
    """Return (threads, file descriptors, children) of every process."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, process in cluster.processes.items():
        proc = Path("/proc") / str(process.pid)
        children = (proc / "task" / str(process.pid) / "children").read_text().split()
        found[name] = (len(os.listdir(proc / "task")), len(os.listdir(proc / "fd")), len(children))
    return found


def is_idle(status: dict[str, Any]) -> bool:
    loads = [worker["load"] for worker in status["workers"]]
    at_rest = all(
        load is not None
        and load["num_free_blocks"] + load["num_cached_blocks"] == load["num_blocks"]
        and load["num_sequences"] == load["num_transfers"] == load["num_queued_tokens"] == 0
        for load in loads
    )
    return at_rest and status["queued"] == 0 and status["running"] == 0


def _reap(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
        return -signal.SIGKILL


def _poisoned(pool: dict[str, Any]) -> dict[str, Any]:
    """A block that is read after it was freed shall change tokens; a spec may say otherwise."""
    return {**pool, "engine": {"poison_freed_blocks": True, **pool.get("engine", {})}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
