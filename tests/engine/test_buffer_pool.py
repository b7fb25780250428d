"""A buffer is used again when nobody can see it any more, and not before."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from twinpool.engine.buffer_pool import MAX_IDLE_BYTES, BufferPool


def address_of(buffer: np.ndarray) -> int:
    return buffer.__array_interface__["data"][0]


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 14, (1 << 14) + 1, 5_000_000])
def test_a_buffer_has_the_length_that_was_asked_for(num_bytes: int) -> None:
    assert BufferPool().take(num_bytes).nbytes == num_bytes


def test_a_buffer_is_used_again_after_the_last_view_of_it_is_gone() -> None:
    """A slice, a reshaped view and a memoryview each keep it, as a message that still has to be sent does."""
    pool = BufferPool()
    first = pool.take(1 << 16)
    place = address_of(first)
    views = [first[10:20], first.reshape(2, -1)[1], first[5:].data, first[1:][1:].data]
    del first
    while views:
        gc.collect()
        assert address_of(pool.take(1 << 16)) != place, f"in use: {views}"
        views.pop()
    assert address_of(pool.take(1 << 15 | 1)) == place


def test_what_waits_for_its_next_use_is_bounded() -> None:
    pool, size = BufferPool(), 1 << 20
    buffers = [pool.take(size) for _ in range(3 * MAX_IDLE_BYTES // size)]
    assert pool.num_idle_bytes == 0
    buffers.clear()
    assert pool.num_idle_bytes == MAX_IDLE_BYTES


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool()

    def use(number: int) -> bool:
        buffer = pool.take(1 << 14)
        buffer[:] = number % 256
        return bool((buffer == number % 256).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(use, range(2000)))
