"""Which program each role is, and the line that starts it. The only place that names the role modules.

The modules are named, never imported: nothing below the launcher is loaded into it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ..config import ClusterSpec, PoolSpec
from .child import ChildCommand
from .placement import Demand
from .run_state import RUN_VARIABLE

ROUTER = "router"
PoolName = Literal["prompt", "completion"]
POOLS: tuple[PoolName, ...] = ("prompt", "completion")


@dataclass(frozen=True)
class Programs:
    """The module of each role, and of what fetches a model."""

    router: str = "twinpool.router"
    prompt: str = "twinpool.prefill_worker"
    completion: str = "twinpool.decode_worker"
    fetch: str = "twinpool.engine.fetch"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class RunPaths:
    """Where one run's programs find their things."""

    run_id: str
    spec_file: Path
    model_folder: Path
    socket_folder: Path
    logs: Path

    @property
    def admin_socket(self) -> Path:
        return self.socket_folder / "admin.sock"

    @property
    def lifeline(self) -> Path:
        return self.socket_folder / "launcher.alive"

    @property
    def control_address(self) -> str:
        return f"ipc://{self.socket_folder}/control.ipc"


@dataclass(frozen=True)
class RoleProcess:
    """One process that a cluster shall have."""

    name: str
    role: str
    command: ChildCommand
    demand: Demand


def demand_of(spec: ClusterSpec, role: str, name: str) -> Demand:
    """What a process asks of its node. The router is light and shares a core."""
    if role == ROUTER:
        return Demand(ROUTER, 0.0, 0.0)
    pool = spec.prompt if role == "prompt" else spec.completion
    return Demand(name, pool.num_cpus, pool.num_gpus, pool.label_selector)


def role_process(spec: ClusterSpec, programs: Programs, paths: RunPaths, role: str, ordinal: int) -> RoleProcess:
    """Put together everything about one process."""
    name = ROUTER if role == ROUTER else f"{role}-{ordinal}"
    arguments = [
        *("-m", {"router": programs.router, "prompt": programs.prompt, "completion": programs.completion}[role]),
        *("--spec", str(paths.spec_file)),
        *("--model-folder", str(paths.model_folder)),
        *("--control", paths.control_address),
        *("--name", name),
        *("--run-folder", str(paths.socket_folder)),
    ]
    if role == ROUTER:
        arguments += ["--admin-socket", str(paths.admin_socket)]
    command = ChildCommand(name, tuple(arguments), paths.logs / f"{name}.log", _environment(spec, paths, role))
    return RoleProcess(name, role, command, demand_of(spec, role, name))


def _environment(spec: ClusterSpec, paths: RunPaths, role: str) -> dict[str, str]:
    pool = PoolSpec() if role == ROUTER else (spec.prompt if role == "prompt" else spec.completion)
    threads = str(pool.engine.num_threads)
    return {
        RUN_VARIABLE: paths.run_id,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **pool.env,
    }
