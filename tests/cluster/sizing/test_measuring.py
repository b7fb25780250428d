"""Shapes are timed in turn within the budget, and a machine that moved is told from one that jitters."""

from collections.abc import Sequence

import pytest
from twinpool.cluster.protocol.errors import LaunchError
from twinpool.cluster.sizing.measuring import Control, Probe, Timed, check_undisturbed, quartile_spread, time_in_turn


class Machine:
    """Hands out probes of constant length and writes down what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    @property
    def spent_s(self) -> float:
        return sum(float(label.split()[0]) * (warmup + repeats) for label, warmup, repeats in self.asked)

    def timed(self, *seconds: float) -> list[Timed]:
        return [Timed(f"{s} s", self.probe(f"{s} s", s)) for s in seconds]

    def control(self, seconds: float) -> Control:
        return Control("control", self.probe(f"{seconds} control", seconds))

    def probe(self, label: str, seconds: float) -> Probe:
        def ask(num_warmup: int, num_repeats: int) -> list[float]:
            self.asked.append((label, num_warmup, num_repeats))
            return [seconds] * num_repeats

        return ask


def quietly(what: str, share: float) -> None:
    del what, share


def test_the_shapes_take_turns_and_short_ones_are_repeated_more_often() -> None:
    machine = Machine()
    shapes = machine.timed(0.01, 0.1, 1.0)
    assert time_in_turn([shapes], [], 5, 20.0, quietly) == []
    after_warm_up = [label for label, _, _ in machine.asked[3:]]
    assert after_warm_up == ["0.01 s", "0.1 s", "1.0 s"] * (len(after_warm_up) // 3)
    assert [len(shape.times_s) // len(shapes[2].times_s) for shape in shapes] == [5, 2, 1]
    assert len(shapes[2].times_s) >= 5
    assert 0.7 * 20 < machine.spent_s <= 20


def test_controls_are_checked_before_and_in_the_middle() -> None:
    machine = Machine()
    control = machine.control(0.01)
    time_in_turn([machine.timed(0.3)], [control], 5, 3.0, quietly)
    positions = [i for i, (label, _, _) in enumerate(machine.asked) if "control" in label]
    assert positions[0] == 0
    assert 2 < positions[1] < len(machine.asked) - 2


def test_what_does_not_fit_is_left_out_dearest_first_but_a_few_of_each_group_stay() -> None:
    machine = Machine()
    long = machine.timed(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    short = machine.timed(0.3, 0.31)
    assert time_in_turn([long, short], [], 3, 60.0, quietly) == ["8.0 s", "7.0 s"]
    assert [len(shape.times_s) for shape in long[-2:]] == [0, 0]
    assert all(len(shape.times_s) >= 2 for shape in (*long[:-2], *short))


def spoilt(times_s: Sequence[float]) -> Timed:
    timed = Machine().timed(1.0)[0]
    timed.times_s = list(times_s)
    return timed


def moved(*medians_s: float) -> Control:
    return Control("a control pass", lambda warmup, repeats: [], [[m, m, m] for m in medians_s])


STEADY = (1.0, 1.01, 0.99, 1.0, 1.02)


def test_the_movement_of_the_controls_is_returned() -> None:
    assert check_undisturbed([spoilt(STEADY)], [moved(1.0, 1.1, 1.0)], 0.25) == pytest.approx(0.05)


def test_a_control_that_moved_is_named_with_its_medians() -> None:
    with pytest.raises(LaunchError, match=r"a control pass took 1000.0, 1000.0, 1400.0 ms"):
        check_undisturbed([spoilt(STEADY)], [moved(1.0, 1.0, 1.4)], 0.25)


def test_single_slow_passes_do_not_count() -> None:
    peaks = (*STEADY, 9.0, *STEADY)
    assert quartile_spread(peaks) < 0.02
    check_undisturbed([spoilt(peaks)] * 3, [moved(1.0, 1.0, 1.0)], 0.25)


def test_repeats_that_scatter_in_most_shapes_are_refused() -> None:
    wild = (1.0, 2.0, 1.1, 1.9, 1.0, 2.1)
    check_undisturbed([spoilt(wild), spoilt(STEADY), spoilt(STEADY)], [moved(1.0, 1.0, 1.0)], 0.25)
    with pytest.raises(LaunchError, match="scatter"):
        check_undisturbed([spoilt(wild), spoilt(wild), spoilt(STEADY)], [moved(1.0, 1.0, 1.0)], 0.25)
