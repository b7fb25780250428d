"""What was made of one job's tokens and has not been sent yet; bounded, for a reader may be slow.

A worker cannot be held back by one reader, so a stream that is full ends its request: the KV blocks are free at once,
and a client that wakes up in time is told why.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from ...cluster.protocol.messages import SampledToken
from ..generation import GenerationFailed
from .choice import Piece

MAX_UNREAD_ENTRIES = 16384  # tokens, and the alternatives beside them: some megabytes
TOO_SLOW = GenerationFailed("slow_reader", "The stream was read so slowly that too much of it was waiting.")

Item = Piece | GenerationFailed | Exception


class Unread:
    """One reader waits at a time. `max_entries` None: a whole answer, which its reader holds anyway."""

    def __init__(self, max_entries: int | None = MAX_UNREAD_ENTRIES) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._items: deque[tuple[Item, int]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item, num_entries: int = 0) -> bool:
        """Keep `item`; False when it does not fit: then all is dropped for the failure that the reader gets."""
        self._num_entries += num_entries
        is_full = self._max_entries is not None and bool(num_entries) and self._num_entries > self._max_entries
        if is_full:
            self._items.clear()
            self._num_entries, item, num_entries = 0, TOO_SLOW, 0
        self._items.append((item, num_entries))
        return not is_full

    def wake(self) -> None:
        """Let the reader look."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, timeout_s: float | None = None) -> Item | None:
        """Return the oldest item; None when there was none within `timeout_s`, or the reader was woken for none."""
        if not self._items:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self.wake) if timeout_s is not None else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        if not self._items:
            return None
        item, num_entries = self._items.popleft()
        self._num_entries -= num_entries
        return item


def num_entries_of(tokens: Sequence[SampledToken]) -> int:
    return sum(1 + len(token.top) for token in tokens)
