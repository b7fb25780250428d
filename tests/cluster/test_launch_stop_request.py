"""The wish to stop, expressed by a signal at the worst moments."""

import subprocess
import sys
import threading

from twinpool.cluster.launch.stop_request import StopRequest

SIGNALLED_WHILE_WAITING = """
import random, signal
from threading import Event
from twinpool.cluster.launch.stop_request import StopRequest

signal.signal(signal.SIGALRM, lambda *_: request.set())
for _ in range(3000):
    request = {kind}()
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))
    while not request.wait(2e-5):
        pass
    request.close()
"""


def test_a_signal_in_mid_wait_is_heard() -> None:
    """The same program waits for ever after some hundred signals with a `threading.Event`, which has no `close`; and,
    with other programs running, after some thousand with a `queue.SimpleQueue`."""
    program = SIGNALLED_WHILE_WAITING.format(kind="StopRequest")
    done = subprocess.run([sys.executable, "-P", "-c", program], timeout=60.0, check=False)
    assert done.returncode == 0


def test_a_wish_stays() -> None:
    request = StopRequest()
    assert not request.is_set()
    assert not request.wait(0.0)
    threading.Thread(target=request.set).start()
    assert request.wait(10.0)
    assert request.is_set()
    assert request.wait(0.0)
    assert request.wait(0.0)
    request.close()
