"""Damaged and random input for whatever decodes bytes from outside: only declared errors, in bounded time and memory.

Input comes from a seed, so that a failure comes again. `hostile` values are put in place of single fields, which no
damage to single bytes would reach.
"""

import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

LIMIT_S = 0.020
LIMIT_BYTES = 10 << 20
TRIES = 20  # processor time is longer, too, while other programs use the caches
HOSTILE: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 10**9, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "5", "\x00\r\n\x1b[31m", "é" * 600, "9" * 5000, "__class__"),
    *([], [[]], {}, [{}], {"": None}, {"x": [1, "a", None]}, [1, 2.5, "a"], [10**9] * 40, [""] * 200),
    *({str(i): i for i in range(400)}, [[i, i] for i in range(300)]),
)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with one to three places changed: a bit, more, less, the rest cut off, a piece twice."""
    result = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(result) + 1)
        match rng.randrange(6):
            case 0 if place < len(result):
                result[place] ^= 1 << rng.randrange(8)
            case 1:
                result.insert(place, rng.randrange(256))
            case 2:
                del result[place:]
            case 3:
                del result[place : place + rng.randrange(1, 9)]
            case 4:
                result[place:place] = result[place : place + rng.randrange(1, 64)]
            case _:
                result[place:place] = rng.randbytes(rng.randrange(6))
    return bytes(result)


def with_one_hostile(rng: random.Random, value: Any) -> Any:
    """Return a copy of a tree of dicts and lists in which one value, somewhere, is another one."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        return {**value, name: with_one_hostile(rng, value[name])}
    if isinstance(value, list | tuple) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], with_one_hostile(rng, value[place]), *value[place + 1 :]]
    return rng.choice(HOSTILE)


def count_refused(
    decode: Callable[[Any], object], inputs: Iterable[Any], declared: tuple[type[Exception], ...]
) -> tuple[int, int]:
    """Decode everything; return how many there were and how many were refused. Any other error fails, and so does
    whatever takes longer than LIMIT_S of this thread's time each time that it is tried."""
    num_all = num_refused = 0
    for data in inputs:
        num_all += 1
        began_s = time.thread_time()
        num_refused += _is_refused(decode, data, declared)
        if time.thread_time() - began_s > LIMIT_S:
            assert any(_timed(decode, data, declared) <= LIMIT_S for _ in range(TRIES)), str(data)[:200]
    return num_all, num_refused


def assert_small(decode: Callable[[Any], object], inputs: Iterable[Any], declared: tuple[type[Exception], ...]) -> None:
    """Each input takes less than LIMIT_BYTES beside itself, and less than LIMIT_S."""
    for data in inputs:
        assert any(_timed(decode, data, declared) <= LIMIT_S for _ in range(TRIES)), str(data)[:200]
        tracemalloc.start()
        try:
            _is_refused(decode, data, declared)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < LIMIT_BYTES, f"{peak_bytes} bytes for {str(data)[:200]}"


def _timed(decode: Callable[[Any], object], data: Any, declared: tuple[type[Exception], ...]) -> float:
    began_s = time.thread_time()
    _is_refused(decode, data, declared)
    return time.thread_time() - began_s


def _is_refused(decode: Callable[[Any], object], data: Any, declared: tuple[type[Exception], ...]) -> bool:
    try:
        decode(data)
    except declared:
        return True
    return False
