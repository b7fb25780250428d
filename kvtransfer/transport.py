"""By what the payloads of one pair of workers travel. Pure.

A COMPLETION worker offers its ways as addresses behind those of its data socket: `gloo://HOST`, `nccl://HOST/GPU`. The
router passes them on with the grant; nothing that a client sends gets here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..cluster.config import TransferSpec, Transport

Way = Literal["zmq", "nccl", "gloo"]


@dataclass(frozen=True)
class Choice:
    way: Way
    reason: str


def offers(spec: TransferSpec, host: str, gpu: str | None) -> tuple[str, ...]:
    """Return what a COMPLETION worker with this GPU (`host/uuid`) offers beside ZMQ, which it always takes."""
    if spec.transport == "gloo":
        return (f"gloo://{host}",)
    return (f"nccl://{gpu}",) if spec.transport in ("auto", "nccl") and gpu is not None else ()


def offered(addresses: Sequence[str], way: Way) -> str | None:
    """Return what stands behind `way` in a peer's addresses, or None when it does not offer that."""
    prefix = f"{way}://"
    return next((address.removeprefix(prefix) for address in addresses if address.startswith(prefix)), None)


def choose_way(spec: TransferSpec, gpu: str | None, addresses: Sequence[str]) -> Choice:
    """Return the way to a peer with `addresses`. Raises ConnectionError when there is none that the spec allows."""
    if spec.transport == "auto":
        return _choose_freely(spec, gpu, addresses)
    if spec.transport == "nccl":
        problem = _nccl_problem(gpu, offered(addresses, "nccl"))
    elif spec.transport == "gloo":
        problem = None if offered(addresses, "gloo") else "the peer offers no Gloo"
    else:
        problem = None
    if problem is not None:
        raise ConnectionError(_refusal(spec.transport, problem, addresses))
    return Choice(spec.transport, f"transfer.transport is {spec.transport}")


def _choose_freely(spec: TransferSpec, gpu: str | None, addresses: Sequence[str]) -> Choice:
    theirs = offered(addresses, "nccl")
    problem = _nccl_problem(gpu, theirs)
    if problem is None and gpu is not None and theirs is not None:
        if gpu.partition("/")[0] == theirs.partition("/")[0]:
            return Choice("nccl", "auto: both have a GPU, on one host")
        if spec.isolated_network:
            return Choice("nccl", "auto: both have a GPU, and transfer.isolated_network is set")
        problem = "the GPUs are on two hosts, and transfer.isolated_network is not set"
    return Choice("zmq", f"auto: {problem}")


def _nccl_problem(ours: str | None, theirs: str | None) -> str | None:
    if ours is None:
        return "this worker has no GPU with NCCL"
    if theirs is None:
        return "the peer offers no NCCL"
    return "both workers are on one GPU, which NCCL does not allow" if ours == theirs else None


def _refusal(transport: Transport, problem: str, addresses: Sequence[str]) -> str:
    theirs = [address.partition(":")[0] for address in addresses]
    return f"transfer.transport is '{transport}' here, the peer offers {theirs}: {problem}"


def advertised(addresses: Sequence[str], elsewhere: str | None) -> tuple[str, ...]:
    """Return what others are told of `addresses`: with `elsewhere`, that in place of the sockets' own."""
    if elsewhere is None:
        return tuple(addresses)
    return (elsewhere, *(address for address in addresses if not address.startswith(("ipc://", "tcp://"))))
