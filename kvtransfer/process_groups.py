"""Two-rank process groups of torch.distributed: payloads from a PROMPT worker (rank 1) to a COMPLETION worker (rank 0).

Both libraries are used below `torch.distributed`'s global state: no `init_process_group`, no listening store. What the
ends must know of each other goes through a RelayStore, whose messages travel on the data connection, which is
encrypted and authenticated where that is. The payloads themselves are neither: see docs/transports.md.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..cluster.protocol.errors import ConfigError

RECEIVER_RANK, SENDER_RANK = 0, 1
PAYLOAD_TAG, ABORT_TAG = 0, 1


class RelayStore(Store):
    """A rendezvous store of one end: what this end sets is relayed to the other, and what that one set comes by `put`.

    A reader waits until its key was put, the time is up, or the communicator was given up.
    """

    def __init__(self, relay: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._relay = relay
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits here gets an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, encoded)
        self._relay(key, encoded)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._changed:
            is_here = self._changed.wait_for(lambda: self._is_closed or self.check(keys), limit_s)
        if self._is_closed or not is_here:
            raise RuntimeError("the communicator was given up" if self._is_closed else "the peer did not join in time")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class ProcessGroup(Protocol):
    """One end of a communicator; used by one thread, except `abort`. Raises RuntimeError when it is broken."""

    def connect(self, store: Store, timeout_s: float) -> None:
        """Find the peer's end, which does the same."""
        ...

    def post(self, num_bytes: int) -> None:
        """Be ready for a payload of `num_bytes`; several may be posted, they come in order."""
        ...

    def take(self, timeout_s: float) -> memoryview:
        """Return the oldest posted payload."""
        ...

    def send(self, payload: memoryview, timeout_s: float) -> None:
        """Send what the peer has posted."""
        ...

    def abort(self) -> None:
        """From any thread: whoever waits in here is to get an error. Never waits for the peer."""
        ...


class GlooGroup:
    """Over TCP from and to `host`, on CPUs."""

    def __init__(self, rank: int, host: str) -> None:
        self._rank, self._peer, self._host = rank, 1 - rank, host
        self._group: Any = None  # dist.ProcessGroupGloo, whose published types lack half of it
        self._posted: deque[tuple[Tensor, dist.Work]] = deque()

    def connect(self, store: Store, timeout_s: float) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]  # its port listens there and nowhere else
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        self._group = gloo(store, self._rank, 2, options)

    def post(self, num_bytes: int) -> None:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self._posted.append((buffer, self._group.recv([buffer], self._peer, PAYLOAD_TAG)))

    def take(self, timeout_s: float) -> memoryview:
        buffer, work = self._posted.popleft()
        work.wait(timedelta(seconds=timeout_s))
        return buffer.numpy().data

    def send(self, payload: memoryview, timeout_s: float) -> None:
        work = self._group.send([_as_tensor(payload)], self._peer, PAYLOAD_TAG)
        work.wait(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Gloo's own abort wakes nobody, but a wait that times out closes the connection under all the others."""
        if self._group is None:
            return  # waits for its store, or for the peer's address to answer: both end by themselves
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            self._group.recv([nothing], self._peer, ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # as intended, or broken already


class NcclGroup:
    """Over whatever NCCL finds between two GPUs. A stream of its own: the engine's kernels are not waited for.

    Payloads come from and go to host memory, where they are checksummed; that costs a copy on either side.
    """

    def __init__(self, rank: int, device: str) -> None:
        if not dist.is_nccl_available():
            raise ConfigError("transfer.transport is 'nccl', but this torch is built without NCCL", hint="auto, or zmq")
        self._rank, self._peer, self._device = rank, 1 - rank, torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._group: Any = None  # dist.ProcessGroupNCCL
        self._posted: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def connect(self, store: Store, timeout_s: float) -> None:
        # Its watchdog would end the process when a peer dies; here deadlines are ours, and abort is their answer.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.max_ctas = 4  # send and receive are kernels: most of the GPU stays with the prefill
        options._timeout = timedelta(seconds=timeout_s)
        self._group = nccl(store, self._rank, 2, options)
        self._group.eager_connect_single_device(self._device)

    def post(self, num_bytes: int) -> None:
        with torch.cuda.stream(self._stream):
            staged = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._group.recv([staged], self._peer, PAYLOAD_TAG).wait()  # waits on the stream, not here
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            buffer.copy_(staged, non_blocking=True)
            staged.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._posted.append((buffer, event))

    def take(self, timeout_s: float) -> memoryview:
        buffer, event = self._posted.popleft()
        _wait_for(event, timeout_s)
        return buffer.numpy().data

    def send(self, payload: memoryview, timeout_s: float) -> None:
        with torch.cuda.stream(self._stream):
            staged = _as_tensor(payload).to(self._device)
            self._group.send([staged], self._peer, PAYLOAD_TAG).wait()
            event = torch.cuda.Event()
            event.record(self._stream)
        _wait_for(event, timeout_s)

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()  # never shutdown, which waits for the peer


def gpu_identity(device: str) -> str | None:
    """Return `host/uuid` of the GPU that `device` names; None when it is no GPU, or torch has no NCCL."""
    if not device.startswith("cuda") or not dist.is_nccl_available():
        return None
    return f"{os.uname().nodename}/{torch.cuda.get_device_properties(torch.device(device)).uuid}"


def _as_tensor(payload: memoryview) -> Tensor:
    return torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=torch.uint8)


def _wait_for(event: torch.cuda.Event, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() >= deadline_s:
            raise RuntimeError(f"no payload within {timeout_s:g} s")
        time.sleep(0.0002)
