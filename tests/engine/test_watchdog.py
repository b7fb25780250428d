"""A hung engine loop ends its process; a slow one, or one that was stopped as a whole, does not."""

import threading
import time
from contextlib import closing

from twinpool.engine.watchdog import LOOKS, STRETCH_FACTOR, Progress, Standstill, Watchdog


def looks(standstill: Standstill, progress: Progress, number: int) -> list[bool]:
    return [standstill.look(progress) for _ in range(number)]


def test_a_loop_that_stands_still_hangs_after_its_time() -> None:
    standstill, progress = Standstill(15.0), Progress()
    assert not any(looks(standstill, progress, LOOKS))
    assert standstill.look(progress)
    assert standstill.stood_s >= 15.0


def test_one_move_begins_the_time_anew() -> None:
    standstill, progress = Standstill(15.0), Progress()
    looks(standstill, progress, LOOKS)
    progress.moved()
    assert not any(looks(standstill, progress, LOOKS))


def test_what_was_computed_at_a_stretch_before_may_be_computed_again() -> None:
    """A layer of a large model may take longer than the limit; a loop that is asleep computes nothing."""
    standstill, progress = Standstill(0.2), Progress()
    progress.longest_stretch_s = 0.1
    num_looks = round(STRETCH_FACTOR * 0.1 / standstill.interval_s)
    assert not any(looks(standstill, progress, num_looks))
    assert any(looks(standstill, progress, 2))


def test_only_computing_makes_a_stretch() -> None:
    progress = Progress()
    progress.moved()
    time.sleep(0.3)
    progress.moved()
    assert progress.longest_stretch_s < 0.2, "asleep"
    until_s = time.thread_time() + 0.3
    while time.thread_time() < until_s:
        pass
    progress.moved()
    assert progress.longest_stretch_s >= 0.3
    assert progress.count == 3


def test_a_watchdog_calls_the_end_once_and_can_be_closed() -> None:
    called = threading.Semaphore(0)
    with closing(Watchdog(Progress(), 0.1, called.release)):
        assert called.acquire(timeout=30)
    assert not called.acquire(blocking=False)


def test_a_closed_watchdog_looks_no_more() -> None:
    called: list[str] = []
    Watchdog(Progress(), 0.05, lambda: called.append("end")).close()
    before = list(called)
    time.sleep(0.2)
    assert called == before
