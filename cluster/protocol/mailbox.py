"""Objects from other threads to one loop that waits in a poll: a queue with a file descriptor."""

import os
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread may `put`; one thread polls `fileno` for reading and calls `drain`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[T] = SimpleQueue()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event_fd

    def put(self, item: T) -> None:
        self._queue.put(item)
        os.eventfd_write(self._event_fd, 1)

    def drain(self) -> list[T]:
        """Return everything that was put so far, in order."""
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return []  # nothing was put since the last call
        items: list[T] = []
        while True:
            try:
                items.append(self._queue.get_nowait())
            except Empty:
                return items

    def close(self) -> None:
        os.close(self._event_fd)
