"""Who does not read is cut off; who reads slowly is not."""

import pytest
from twinpool.router.connection import SendWatch


def test_a_reader_that_takes_nothing_has_stalled_after_the_limit() -> None:
    """However much is written meanwhile."""
    watch = SendWatch(30.0, now=0.0)
    assert [watch.look(100 + i, 100 + i, now=10.0 * i) for i in range(1, 5)] == [False, False, True, True]


@pytest.mark.parametrize("num_waiting", [0, 60_000])
def test_time_without_anything_to_send_is_no_stall(num_waiting: int) -> None:
    watch = SendWatch(30.0, now=0.0)
    assert not watch.look(100, 0, now=100.0)
    assert not watch.look(100 + num_waiting, num_waiting, now=110.0)
    assert watch.look(100 + num_waiting, num_waiting, now=140.0) == (num_waiting > 0)


def test_a_slow_reader_behind_a_fast_writer_goes_on() -> None:
    """What waits grows all the time, yet a byte leaves now and then."""
    watch = SendWatch(30.0, now=0.0)
    assert not any(watch.look(num_written_bytes=i * 1000, num_waiting_bytes=i * 999, now=29.0 * i) for i in range(20))
