"""Every kind of data channel, made the way the workers make it: both ends, in one process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import zmq
from memory_channel import MemoryReceiver, MemorySender
from twinpool.cluster.config import LivenessSpec, TransferSpec
from twinpool.kvtransfer.channel import ReceiverEnd, SenderEnd
from twinpool.kvtransfer.open_channel import ChannelOpener
from twinpool.kvtransfer.zmq_channel import ZmqReceiver, ZmqSender

Kind = Literal["memory", "ipc", "tcp", "gloo"]
KINDS: tuple[Kind, ...] = ("memory", "ipc", "tcp", "gloo")
MAX_FRAME_BYTES = 1 << 16
SEND_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Channel:
    receiver: ReceiverEnd
    open_sender: Callable[[], SenderEnd]


def not_stuck(what: str) -> None:
    raise AssertionError(what)


def make_channel(
    kind: Kind, context: zmq.Context[zmq.Socket[bytes]], folder: Path, max_frame_bytes: int = MAX_FRAME_BYTES
) -> Channel:
    """Bind the receiver; the caller closes it. Senders of kind `gloo` reach it over ipc."""
    if kind == "memory":
        receiver = MemoryReceiver()
        return Channel(receiver, partial(MemorySender, receiver))
    spec = TransferSpec(transport="gloo" if kind == "gloo" else "zmq", max_frame_bytes=max_frame_bytes)
    opener = ChannelOpener(spec, LivenessSpec(), "cpu", not_stuck)
    receiver = opener.open_receiver(partial(ZmqReceiver, context, folder / "kv", max_frame_bytes))
    ways = [address for address in receiver.addresses if kind == "gloo" or address.startswith(kind)]
    make_socket = partial(ZmqSender, context, ways, max_frame_bytes, SEND_TIMEOUT_S)
    return Channel(receiver, partial(opener.open_sender, make_socket, ways, "completion-0"))
