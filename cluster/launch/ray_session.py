"""Starts an embedded Ray, or joins an existing one, and nothing in between: never a bare `ray.init()`.

An embedded Ray talks over loopback and asks for a token of our own (its gRPC servers listen on every interface,
whatever they are told). It keeps its files in the run's socket folder and dies with this process. A cluster that the
user names by address keeps its own token and its own rules.
Ray reads its environment when it is imported, so `prepare_environment` has to come first; that is why nothing here
imports Ray at the top.
"""

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from ..protocol.errors import LaunchError
from .placement import Node

EMBEDDED = "local"
# CPUs of an embedded Ray only count processes: whoever asks for four workers on two cores shall have them.
EMBEDDED_CPUS = 1024
NICENESS = "RAY_worker_niceness"
LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 to mean the interface that others reach, and a laptop's may change
MIN_OBJECT_STORE_BYTES = 80 << 20
PROBE_TIMEOUT_S = 5.0
JOIN_TIMEOUT_HINT = "is it running there (`ray status`), and is its token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token?"


def prepare_environment(address: str, token_file: Path) -> None:
    """Set what Ray reads at import. Only an embedded Ray gets our token; the user's own cluster has the user's."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS"] = "0"
    # A process that asks for no GPU keeps what the user lets it see, so that `device: auto` finds a shared one.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    if address == EMBEDDED:
        write_token(token_file)
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
        os.environ[NICENESS] = "0"  # Ray's own is 15: then whatever runs beside a cluster is served before it
        for foreign in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_NAMESPACE"):
            os.environ.pop(foreign, None)
    elif "RAY_AUTH_MODE" not in os.environ and _has_token():
        os.environ["RAY_AUTH_MODE"] = "token"


def write_token(token_file: Path) -> None:
    """Write a fresh random token that only this user can read."""
    token_file.parent.mkdir(parents=True, exist_ok=True)
    token_file.unlink(missing_ok=True)
    descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def connect(address: str, namespace: str, ray_folder: Path) -> None:
    """Start the embedded Ray, or join the one at `address`. Raises LaunchError."""
    if address != EMBEDDED:
        _check_listening(address)
    import ray

    try:
        if address == EMBEDDED:
            ray.init(
                address="local",
                num_cpus=EMBEDDED_CPUS,
                include_dashboard=False,
                object_store_memory=MIN_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.WARNING,
                namespace=namespace,
                _temp_dir=str(ray_folder),
                _node_ip_address=LOOPBACK,
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, namespace=namespace)
    except Exception as error:  # Ray raises many kinds; each means that there is no Ray for us
        what = "the embedded Ray did not start" if address == EMBEDDED else f"cannot join Ray at {address}"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LaunchError(f"{what}: {reason}", hint=None if address == EMBEDDED else JOIN_TIMEOUT_HINT) from error


def _check_listening(address: str) -> None:
    """Raise LaunchError when nobody listens at HOST:PORT: Ray itself would wait for minutes. Other forms are Ray's."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise LaunchError(f"cannot join Ray at {address}: {error.strerror or error}", hint=JOIN_TIMEOUT_HINT) from error


def nodes() -> tuple[list[Node], list[str]]:
    """Return the living nodes on this host, and the names of those elsewhere.

    All processes of a cluster share one host for now: the control socket between hosts needs keys (DESIGN section 5).
    """
    import ray

    here = ray.util.get_node_ip_address()
    local: list[Node] = []
    remote: list[str] = []
    for row in ray.nodes():
        if not row["Alive"]:
            continue
        if row["NodeManagerAddress"] in (here, "127.0.0.1"):
            local.append(Node(row["NodeName"], row["Resources"], row.get("Labels", {})))
        else:
            remote.append(f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})")
    return local, remote


def local_only(selector: dict[str, str], local: Sequence[Node], num_remote: int) -> dict[str, str]:
    """Narrow a label selector to the nodes of this host when there are others."""
    if not num_remote:
        return selector
    ids = [node.labels["ray.io/node-id"] for node in local]
    return selector | {"ray.io/node-id": f"in({','.join(ids)})"}


def disconnect() -> None:
    import ray

    ray.shutdown()


def _has_token() -> bool:
    named = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return named or (Path.home() / ".ray" / "auth_token").exists()
