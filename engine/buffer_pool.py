"""Memory for payloads, used again when nobody refers to it any more. Knows nothing of what lies in it.

Fresh memory is made of pages that the system must find and clear when they are first written, which takes longer than
the copy that fills them; and a buffer that was written lately is still in the processor's cache.
"""

import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

SMALLEST_BYTES = 1 << 14
MAX_IDLE_BYTES = 16 << 20  # of one size; what comes home beyond that goes back to the system


class BufferPool:
    """Any thread may `take`. A buffer comes home by itself, when the last view of it is gone."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[NDArray[np.uint8]]] = {}  # size, a power of two → buffers, the latest first

    @property
    def num_idle_bytes(self) -> int:
        return sum(size * len(idle) for size, idle in list(self._idle.items()))

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return so many bytes, of any content, that nobody else has."""
        size = max(SMALLEST_BYTES, 1 << max(0, num_bytes - 1).bit_length())
        idle = self._idle.setdefault(size, deque(maxlen=max(1, MAX_IDLE_BYTES // size)))
        try:
            whole = idle.popleft()
        except IndexError:
            whole = np.empty(size, dtype=np.uint8)
        # Not a slice of `whole`: numpy lets slices of a slice refer to the whole, and this one could go before them.
        lent = np.frombuffer(whole.data, dtype=np.uint8, count=num_bytes)
        weakref.finalize(lent, idle.appendleft, whole).atexit = False
        return lent
