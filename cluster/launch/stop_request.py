"""A wish to stop that a signal handler may express.

`threading.Event` takes a lock to be set: a handler that interrupts the very thread that waits for the event, between
two of its instructions, would wait for itself. `queue.SimpleQueue` has no such lock, but in Python 3.11 a `get` that a
signal interrupts just before its time is over waits for ever. A descriptor has neither: it is written to by the
handler, and select ends in time.
"""

import os
import select


class StopRequest:
    """Set once, by any thread or signal handler; one thread waits."""

    def __init__(self) -> None:
        self._is_set = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        self._is_set = True
        os.eventfd_write(self._event_fd, 1)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait for the wish, no longer than this; return whether it is there.

        A wait has to end by itself: a signal that the kernel gives to another thread does not wake the main thread,
        the only one that runs handlers.
        """
        if not self._is_set:
            select.select([self._event_fd], [], [], timeout_s)
        return self._is_set

    def close(self) -> None:
        """Nobody sets it any more, or waits."""
        os.close(self._event_fd)
