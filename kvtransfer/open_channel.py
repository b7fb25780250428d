"""Opens the two ends of data channels, by what the spec, the GPUs and the peer allow.

torch takes seconds to import: what needs it is imported only where KV goes by more than ZMQ.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..cluster.config import LivenessSpec, TransferSpec
from ..cluster.protocol.errors import ConfigError
from .channel import ReceiverEnd, SenderEnd
from .frames import ANNOUNCING_FROM_RECEIVER, ANNOUNCING_FROM_SENDER, FROM_RECEIVER, FROM_SENDER
from .staging import StagingLimits
from .transport import Choice, Way, choose_way, offered, offers
from .zmq_channel import ZmqReceiver, ZmqSender

if TYPE_CHECKING:
    from .communicator import CommunicatorSettings

log = logging.getLogger(__name__)

BUILD_S = 10.0  # NCCL takes seconds
FREE_S = 15.0  # longer than Gloo waits for a connection, which nothing ends before its time
MAX_STAGED_FRAMES = 16
WILDCARDS = ("0.0.0.0", "::", "*")


class ChannelOpener:
    """One for a worker. Its engine runs on `device`; `on_stuck` ends a process that cannot free a communicator."""

    def __init__(
        self, transfer: TransferSpec, liveness: LivenessSpec, device: str, on_stuck: Callable[[str], object]
    ) -> None:
        self._transfer = transfer
        self._wait_s = liveness.lease_s
        self._device = device
        self._on_stuck = on_stuck
        self._gpu = _gpu_identity(device) if transfer.transport in ("auto", "nccl") else None
        self._lock = threading.Lock()
        self._num_communicating = 0
        if transfer.transport == "nccl" and self._gpu is None:
            raise ConfigError(
                f"transfer.transport is 'nccl', but this worker computes on {device!r} or its torch has no NCCL",
                hint="transfer.transport: auto, or zmq",
            )

    def open_receiver(self, make_socket: Callable[..., ZmqReceiver]) -> ReceiverEnd:
        """`make_socket` takes `kinds`. Raises ConfigError when it does."""
        if self._transfer.transport == "zmq" or (self._transfer.transport == "auto" and self._gpu is None):
            return make_socket(kinds=FROM_SENDER)
        from .collective_channel import CollectiveReceiver

        socket = make_socket(kinds=ANNOUNCING_FROM_SENDER)
        way: Way = "gloo" if self._transfer.transport == "gloo" else "nccl"
        host = _host_of(socket.addresses)
        return CollectiveReceiver(
            socket,
            offers(self._transfer, host, self._gpu),
            self._settings(way, host),
            StagingLimits(
                max_communicators=self._transfer.max_communicators,
                max_frame_bytes=self._transfer.max_frame_bytes,
                max_staged_bytes=MAX_STAGED_FRAMES * self._transfer.max_frame_bytes,
                wait_s=self._wait_s,
                build_s=BUILD_S,
                idle_s=self._transfer.communicator_idle_s,
            ),
        )

    def open_sender(self, make_socket: Callable[..., ZmqSender], addresses: Sequence[str], peer: str) -> SenderEnd:
        """`make_socket` takes `kinds`. Raises ConnectionError when there is no way to the peer that the spec allows."""
        choice = self._choose(addresses)
        log.info("KV to %s goes by %s (%s)", peer, choice.way, choice.reason)
        if choice.way == "zmq":
            return make_socket(kinds=FROM_RECEIVER)
        from .collective_channel import CollectiveSender

        try:
            settings = self._settings(choice.way, _host_towards(offered(addresses, choice.way) or ""))
            socket = make_socket(kinds=ANNOUNCING_FROM_RECEIVER)
        except BaseException:
            self._give_back()
            raise
        return CollectiveSender(socket, settings, MAX_STAGED_FRAMES * self._transfer.max_frame_bytes, self._give_back)

    def _choose(self, addresses: Sequence[str]) -> Choice:
        choice = choose_way(self._transfer, self._gpu, addresses)
        if choice.way == "zmq":
            return choice
        with self._lock:
            if self._num_communicating >= self._transfer.max_communicators:
                return Choice("zmq", f"{self._num_communicating} others use {choice.way}: transfer.max_communicators")
            self._num_communicating += 1
        return choice

    def _give_back(self) -> None:
        with self._lock:
            self._num_communicating -= 1

    def _settings(self, way: Way, host: str) -> "CommunicatorSettings":
        from .communicator import CommunicatorSettings
        from .process_groups import GlooGroup, NcclGroup

        device = self._device
        return CommunicatorSettings(
            way=way,
            make_group=(lambda rank: GlooGroup(rank, host)) if way == "gloo" else lambda rank: NcclGroup(rank, device),
            build_s=BUILD_S,
            wait_s=self._wait_s,
            free_s=FREE_S,
            on_stuck=self._on_stuck,
        )


def _gpu_identity(device: str) -> str | None:
    if not device.startswith("cuda"):
        return None
    from .process_groups import gpu_identity

    return gpu_identity(device)


def _host_of(addresses: Sequence[str]) -> str:
    """Return the host that a receiver's TCP socket listens on, and so Gloo may."""
    tcp = next(address for address in addresses if address.startswith("tcp://"))
    host = tcp.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return os.uname().nodename if host in WILDCARDS else host


def _host_towards(host: str) -> str:
    """Return our address on the network that `host` is on. Sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
