"""Times many shapes in turn, and tells whether the machine held still meanwhile.

Every shape is visited once a round, so that a machine that gets slower shows as scatter of all shapes rather than as
a slope of the last ones. Control shapes are timed at the start, in the middle and at the end. Knows no costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median, quantiles

from ..protocol.errors import LaunchError

Probe = Callable[[int, int], list[float]]  # (warm-up, repeats) → seconds of each repeat
Report = Callable[[str, float], None]  # what is being timed, share of the whole that is done

MIN_ROUNDS = 5  # a median of five survives two slow passes
MIN_ROUNDS_QUICK = 3
MAX_ROUNDS = 10
LONG_S = 1.5  # passes this long are visited every other round: they scatter less and cost most
MIN_SPREAD_REPEATS = 3
MIN_KEPT = 6  # shapes of a group, enough for every fit
MAX_REPEATS_A_VISIT = 5
WARM_UP_SHARE = 0.15  # of the progress
VISIT_S = 0.25  # short passes are repeated until a visit takes about this long
CONTROL_REPEATS = 9


@dataclass
class Timed:
    """One shape with all its repeats so far."""

    label: str
    probe: Probe
    times_s: list[float] = field(default_factory=list[float])
    estimate_s: float = 0.0

    @property
    def num_repeats(self) -> int:
        """How many repeats a visit has."""
        return max(1, min(MAX_REPEATS_A_VISIT, int(VISIT_S / max(1e-9, self.estimate_s))))

    @property
    def num_warmup(self) -> int:
        return 1 if self.estimate_s < VISIT_S else 0

    @property
    def period(self) -> int:
        """It is visited every so many rounds."""
        return 2 if self.estimate_s > LONG_S else 1

    def cost_s(self, num_rounds: int) -> float:
        """Return how long its visits take in so many rounds."""
        return self.estimate_s * (self.num_repeats + self.num_warmup) * ceil(num_rounds / self.period)

    def visit(self) -> None:
        self.times_s += self.probe(self.num_warmup, self.num_repeats)


@dataclass
class Control:
    """A shape that should take the same time whenever it is asked for."""

    label: str
    probe: Probe
    blocks_s: list[list[float]] = field(default_factory=list[list[float]])

    def check(self) -> None:
        self.blocks_s.append(self.probe(2, CONTROL_REPEATS))

    @property
    def movement(self) -> float:
        """How far the slowest block's median lies above the fastest's, relative."""
        medians = [median(block) for block in self.blocks_s]
        return max(medians) / min(medians) - 1


def time_in_turn(
    groups: Sequence[Sequence[Timed]], controls: Sequence[Control], min_rounds: int, budget_s: float, report: Report
) -> list[str]:
    """Time all shapes round after round within the budget; return the labels that it had no room for.

    The first round warms up and is not counted; it says how long each shape takes. `min_rounds` are always made: of a
    budget that they do not fit, the most expensive shapes are left out, but a few of each group are kept.
    """
    timed = [shape for group in groups for shape in group]
    check_controls(controls)
    for number, shape in enumerate(timed):
        report(f"warming up: {shape.label}", WARM_UP_SHARE * number / len(timed))
        shape.estimate_s = shape.probe(0, 1)[0]
    budget_s -= sum(shape.estimate_s for shape in timed)
    chosen, left_out = _affordable(groups, min_rounds, budget_s)
    num_rounds = min_rounds
    while num_rounds < MAX_ROUNDS and _cost_s(chosen, num_rounds + 1) <= budget_s:
        num_rounds += 1
    for number in range(num_rounds):
        if number == num_rounds // 2:
            check_controls(controls)
        for position, shape in enumerate(chosen):
            if number % shape.period == 0:
                done = (number + position / len(chosen)) / num_rounds
                report(shape.label, WARM_UP_SHARE + (1 - WARM_UP_SHARE) * done)
                shape.visit()
    return left_out


def _affordable(groups: Sequence[Sequence[Timed]], num_rounds: int, budget_s: float) -> tuple[list[Timed], list[str]]:
    """Return the shapes whose rounds fit the budget, and the labels of those that were left out for them."""
    kept = [sorted(group, key=lambda shape: shape.estimate_s) for group in groups]
    left_out: list[str] = []
    while sum(_cost_s(group, num_rounds) for group in kept) > budget_s:
        rich = [group for group in kept if len(group) > MIN_KEPT]
        if not rich:
            break
        left_out.append(max(rich, key=lambda group: group[-1].estimate_s).pop().label)
    return [shape for group in kept for shape in group], left_out


def _cost_s(timed: Sequence[Timed], num_rounds: int) -> float:
    return sum(shape.cost_s(num_rounds) for shape in timed)


def check_controls(controls: Sequence[Control]) -> None:
    for control in controls:
        control.check()


def check_undisturbed(timed: Sequence[Timed], controls: Sequence[Control], limit: float) -> float:
    """Return how far the machine moved, relative. Raises LaunchError when it was more than `limit`.

    Two signs of other work on the machine: a control's medians moved, or the repeats of most shapes scatter (half the
    distance between their quartiles). Single slow passes move neither.
    """
    for control in controls:
        if control.movement > limit:
            seen = ", ".join(f"{median(block) * 1e3:.1f}" for block in control.blocks_s)
            raise _disturbed(f"{control.label} took {seen} ms at the start, in the middle and at the end", limit)
    repeated = [shape for shape in timed if len(shape.times_s) >= MIN_SPREAD_REPEATS]
    typical = sorted(repeated, key=lambda shape: quartile_spread(shape.times_s))[len(repeated) // 2]
    spread = quartile_spread(typical.times_s)
    if spread > limit:
        raise _disturbed(f"repeats of the same pass scatter by ±{spread:.0%}, for example {typical.label}", limit)
    return max(control.movement for control in controls) / 2


def quartile_spread(times_s: Sequence[float]) -> float:
    """Return half the distance between the quartiles over the median."""
    first, middle, third = quantiles(times_s, n=4, method="inclusive")
    return (third - first) / 2 / middle


def _disturbed(what: str, limit: float) -> LaunchError:
    return LaunchError(
        f"the machine was disturbed while it was timed: {what}; more than {limit:.0%} is not measured, and no profile "
        "was written",
        hint="stop other work on the workers' hosts and try again, or allow more with --max-disturbance",
    )
