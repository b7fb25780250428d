"""Nothing of a link may be left: no thread, no descriptor."""

import os
import threading
from collections.abc import Iterator

import pytest
import zmq


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()  # hangs, and so fails by the time limit, while a socket is open
    assert set(threading.enumerate()) <= threads, "a thread was left behind"
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "a descriptor was left behind"
