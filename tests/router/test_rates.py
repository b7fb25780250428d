"""How fast something goes while there is something to do."""

import pytest
from twinpool.router.rates import BusyRate


def test_idle_time_does_not_count() -> None:
    rate = BusyRate(window_s=5.0)
    assert rate.per_s is None
    rate.observe(0, 0.0, is_busy=True)
    rate.observe(30, 1.0, is_busy=False)
    rate.observe(0, 100.0, is_busy=True)
    rate.observe(30, 101.0, is_busy=False)
    assert rate.per_s == pytest.approx(30.0, rel=0.1)


def test_what_comes_in_one_moment_is_counted_in_full() -> None:
    """Four prompts of one step end together."""
    rate = BusyRate(window_s=50.0)
    rate.observe(0, 0.0, is_busy=True)
    for step in range(1, 6):
        for _ in range(4):
            rate.observe(10, float(step), is_busy=True)
    assert rate.per_s == pytest.approx(40.0, rel=0.1)


def test_the_latest_busy_seconds_count_most() -> None:
    rate = BusyRate(window_s=5.0)
    for tenth in range(200):
        rate.observe(10 if tenth < 100 else 1, tenth / 10, is_busy=True)
    assert rate.per_s == pytest.approx(10 + 90 * 0.135, rel=0.1), "two windows after it fell from 100 to 10"


def test_a_moment_is_no_measurement() -> None:
    rate = BusyRate(window_s=5.0, least_s=1.0)
    rate.observe(0, 0.0, is_busy=True)
    rate.observe(1000, 0.5, is_busy=True)
    assert rate.per_s is None
    rate.observe(1000, 1.6, is_busy=True)
    assert rate.per_s is not None


def test_nothing_done_is_no_rate() -> None:
    rate = BusyRate(window_s=5.0)
    rate.observe(0, 0.0, is_busy=True)
    rate.observe(0, 9.0, is_busy=True)
    assert rate.per_s is None
