"""The largest lateness of the last 15 s, against looking at everything."""

from hypothesis import given, strategies as st
from twinpool.router.loop_lag import WINDOW_S, LoopLag


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1))))
def test_it_is_the_largest_in_the_window(steps: list[tuple[float, float]]) -> None:
    lag, now, seen = LoopLag(), 0.0, list[tuple[float, float]]()
    for after_s, late_s in steps:
        now += after_s
        seen.append((now, late_s))
        lag.note(late_s, now)
        assert lag.worst_s(now) == max(late for at, late in seen if at >= now - WINDOW_S)
    assert lag.worst_s(now + WINDOW_S + 1) == 0.0
