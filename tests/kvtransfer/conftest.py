"""A ZMQ context and a short folder for sockets; at the end no thread and no descriptor may be left."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from channel_kinds import Channel, Kind, make_channel
from completion_side import CompletionSide
from prompt_side import LIMITS, Connect, PromptSide
from twinpool.engine.fake import FAKE_LAYOUT, FakeEngine
from twinpool.kvtransfer.receiver import Receiver
from twinpool.kvtransfer.sender import SenderLimits

Context = zmq.Context[zmq.Socket[bytes]]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="session")
def lent_once() -> None:
    """Lend one large buffer to ZMQ: pyzmq then starts its one thread a process that gives such buffers back."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://once")
        b.connect("inproc://once")
        a.send(bytes(1 << 20), copy=False)
        b.recv()


@pytest.fixture
def context(lent_once: None) -> Iterator[Context]:
    threads, descriptors = set(threading.enumerate()), num_descriptors()
    context: Context = zmq.Context()
    yield context
    context.term()  # hangs, and so fails by the time limit, while a socket is open
    assert set(threading.enumerate()) <= threads, "a thread was left behind"
    assert num_descriptors() <= descriptors, "a descriptor was left behind"


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tp-", dir="/tmp"))  # short: a socket's path has at most 107 letters
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def kind() -> Kind:
    """The kind of channel; a test for all of them is parametrised with it."""
    return "ipc"


@pytest.fixture
def channel(kind: Kind, context: Context, socket_folder: Path) -> Iterator[Channel]:
    channel = make_channel(kind, context, socket_folder)
    yield channel
    channel.receiver.close()


@pytest.fixture
def completion_side(channel: Channel) -> CompletionSide:
    return CompletionSide(channel.receiver, FakeEngine(12, 5, 2**31 - 1), Receiver(FAKE_LAYOUT, 5.0))


@pytest.fixture
def connect(channel: Channel) -> Iterator[Connect]:
    sides: list[PromptSide] = []

    def new(limits: SenderLimits = LIMITS, **more: Any) -> PromptSide:
        sides.append(PromptSide(channel.open_sender, limits, **more))
        return sides[-1]

    yield new
    for side in sides:
        side.thread.stop(wait_s=20.0)
