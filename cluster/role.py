"""What every role program has in common: its flags, its log lines, and that it dies with its parent.

    python -m twinpool.router          --spec S --model-folder M --control ADDRESS --admin-socket PATH [--parent-fd N]
    python -m twinpool.prefill_worker  --spec S --model-folder M --control ADDRESS --name prompt-0 --run-folder D …
    python -m twinpool.decode_worker   --spec S --model-folder M --control ADDRESS --name completion-0 --run-folder D …

A worker serves every router that it is given a --control for. The launcher and Helm start the same lines.
Exit codes: 0 stopped, 2 wrong configuration, 3 refused by the router, 4 the engine loop hung, 5 a communicator for KV
hung.
"""

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .config import ClusterSpec, load_spec
from .log_lines import set_up_logging
from .protocol.errors import ConfigError, TwinpoolError
from .protocol.keys import KeyRing, load_keys

EXIT_CONFIG = 2
EXIT_REFUSED = 3
EXIT_HUNG = 4
EXIT_STUCK = 5
PR_SET_PDEATHSIG = 1
ANY_HOST = ("0.0.0.0", "*")


@dataclass(frozen=True)
class RoleArguments:
    spec: ClusterSpec
    model_folder: Path
    control: tuple[str, ...]  # a router has one, a worker one for each router that it serves
    name: str
    run_folder: Path
    admin_socket: Path | None
    data_port: int = 0
    data_host: str = "127.0.0.1"
    advertise: str | None = None
    keys: KeyRing | None = None


def parse_role_arguments(program: str, argv: list[str] | None = None) -> RoleArguments:
    """Read the flags, start the parent watch, set up logging. Raises ConfigError for a bad spec or folder."""
    parser = argparse.ArgumentParser(prog=f"python -m twinpool.{program}", description=f"Twinpool's {program} process.")
    parser.add_argument("--spec", type=Path, required=True, help="cluster spec, YAML or JSON")
    parser.add_argument("--model-folder", type=Path, required=True, help="local Hugging Face folder")
    parser.add_argument(
        "--control",
        required=True,
        action="append",
        help="ZMQ address of the router's control socket; for a worker of several routers: again for each, or A,B,…",
    )
    parser.add_argument("--name", default=program, help="stable name of this process, e.g. prompt-0")
    parser.add_argument("--run-folder", type=Path, default=Path("."), help="folder for this run's ipc sockets")
    parser.add_argument("--data-port", type=int, default=0, help="COMPLETION only: TCP port for KV; default: any free")
    parser.add_argument("--data-host", default="127.0.0.1", help="COMPLETION only: where KV is listened for")
    parser.add_argument("--advertise", help="COMPLETION only: where it is reached, if elsewhere: tcp://HOST:PORT")
    parser.add_argument("--keys", type=Path, help="folder by `twinpool keys`, instead of the spec's")
    parser.add_argument("--admin-socket", type=Path, help="router only: unix socket of the admin endpoint")
    parser.add_argument("--parent-fd", type=int, help="inherited pipe; this process exits when it closes")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    given = parser.parse_args(argv)
    set_up_logging(given.name, given.log_level, "text")
    if given.parent_fd is not None:
        exit_with_parent(given.parent_fd)
    spec = load_spec(given.spec)
    set_up_logging(given.name, given.log_level, spec.log_format)
    if not given.model_folder.is_dir():
        raise ConfigError(
            f"--model-folder {given.model_folder} is not a folder", hint="python -m twinpool.engine.fetch"
        )
    if given.advertise is not None and not given.advertise.startswith("tcp://"):
        raise ConfigError(f"--advertise {given.advertise} is not of the form tcp://HOST:PORT")
    if given.data_host in ANY_HOST and given.advertise is None:
        raise ConfigError(
            f"--data-host {given.data_host} is no address that others can be told", hint="--advertise tcp://HOST:PORT"
        )
    return RoleArguments(
        spec,
        given.model_folder,
        _control_addresses(program, given.control),
        given.name,
        given.run_folder,
        given.admin_socket,
        given.data_port,
        given.data_host,
        given.advertise,
        _keys(spec, given.keys, given.name),
    )


def _control_addresses(program: str, given: list[str]) -> tuple[str, ...]:
    addresses = tuple(address.strip() for text in given for address in text.split(","))
    if "" in addresses or len(set(addresses)) < len(addresses):
        raise ConfigError(f"--control {','.join(given)} names an address twice, or an empty one")
    if program == "router" and len(addresses) > 1:
        raise ConfigError(
            f"--control {','.join(given)}: a router has one control socket",
            hint="start another router for each, and give all their addresses to the workers",
        )
    return addresses


def _keys(spec: ClusterSpec, flag: Path | None, name: str) -> KeyRing | None:
    folder = spec.security.keys_folder if flag is None else flag
    return None if folder is None else load_keys(Path(folder).expanduser(), name)


def exit_with_parent(parent_fd: int) -> None:
    """End this process within a second of its parent's death, however the parent died.

    The inherited pipe closes with the parent; PDEATHSIG is the second line, for a parent that was stopped in fork.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def watch() -> None:
        os.read(parent_fd, 1)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_stuck_process(what: str) -> NoReturn:
    """End this process at once, from any thread: what hangs would hang an orderly end as well."""
    logging.getLogger("twinpool").critical("%s: this process ends itself, to be started again", what)
    logging.shutdown()
    os._exit(EXIT_STUCK)


def run_role(main: Callable[[], int]) -> None:
    """Run a role's main; a TwinpoolError becomes one line and an exit code, never a traceback."""
    try:
        code = main()
    except ConfigError as error:
        logging.getLogger("twinpool").error("%s", error)
        code = EXIT_CONFIG
    except TwinpoolError as error:
        logging.getLogger("twinpool").error("%s", error)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
