"""A wish to stop that a signal handler may express.

`threading.Event` takes a lock to be set: a handler that interrupts the very thread that waits for the event, between
two of its instructions, would wait for itself. `SimpleQueue.put` is made to be called there.
"""

from queue import Empty, SimpleQueue


class StopRequest:
    """Set once, by any thread or signal handler; one thread waits."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait for the wish, no longer than this; return whether it is there.

        A wait has to end by itself: a signal that the kernel gives to another thread does not wake the main thread,
        the only one that runs handlers.
        """
        if not self._is_set:
            try:
                self._wake.get(timeout=timeout_s)
            except Empty:
                return False
        return True
