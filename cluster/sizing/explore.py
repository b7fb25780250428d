"""What surrounds a plan: attainment over pool sizes, and goodput against rate for each policy. For its report."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..costs import CostModel
from .plan import Plan, Progress
from .trials import Candidate, Samples, Trial, Trials, is_pair

MAP_RADIUS = 2  # pools this much smaller and larger than the best are simulated for the map
RATES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # multiples of the workload's own


@dataclass(frozen=True)
class RatePoint:
    offered_per_s: float
    goodput_per_s: float
    attainment: float


@dataclass(frozen=True)
class Exploration:
    attainments: dict[tuple[int, int], float]  # by (PROMPT, COMPLETION) workers
    centre: tuple[int, int] | None  # the best pair, or the one nearest to meeting the SLO
    curves: dict[Candidate, list[RatePoint]]  # of the best of each policy


def explore(plan: Plan, samples: Samples, cost: CostModel, on_progress: Progress) -> Exploration:
    """Simulate around the plan's best candidates. A policy without one that meets the SLO shows its nearest."""
    trials = Trials(samples, cost, plan.slo, plan.limits, on_progress, plan.trials, plan.demand.offered_per_s)
    best = _best_by_policy(plan)
    pair = next((trial.candidate for trial in best if is_pair(trial.candidate.policy)), None)
    if pair is not None:
        for candidate in _around(pair, plan.limits.max_workers):
            trials(candidate)
    attainments = {
        (trial.candidate.num_prompt, trial.candidate.num_completion): trial.attainment
        for trial in trials.all()
        if pair is not None and trial.candidate.policy == pair.policy
    }
    centre = None if pair is None else (pair.num_prompt, pair.num_completion)
    return Exploration(attainments, centre, {t.candidate: _curve(trials, t.candidate) for t in best})


def knee_per_s(curve: Sequence[RatePoint], attainment: float) -> float | None:
    """Return the highest rate of the curve that still attains so much."""
    return max((point.offered_per_s for point in curve if point.attainment >= attainment), default=None)


def _best_by_policy(plan: Plan) -> list[Trial]:
    def key(trial: Trial) -> tuple[bool, float, float]:
        cost = trial.candidate.cost(plan.limits) if trial.meets else 0.0
        return not trial.meets, cost, -trial.attainment

    best: dict[str, Trial] = {}
    for trial in sorted(plan.trials, key=key):
        best.setdefault(trial.candidate.policy, trial)
    return list(best.values())


def _around(pair: Candidate, max_workers: int) -> list[Candidate]:
    shifts = range(-MAP_RADIUS, MAP_RADIUS + 1)
    sizes = [(pair.num_prompt + p, pair.num_completion + d) for p in shifts for d in shifts]
    return [Candidate(pair.policy, p, d) for p, d in sizes if p >= 1 and d >= 1 and p + d <= max_workers]


def _curve(trials: Trials, candidate: Candidate) -> list[RatePoint]:
    points: list[RatePoint] = []
    for rate in RATES:
        trial = trials(candidate) if rate == 1 else trials.variant(candidate, rate=rate)
        offered = trial.offered_per_s or trial.mean(lambda summary: summary.arrivals_per_s)
        if offered is not None:
            points.append(RatePoint(offered, trial.goodput_per_s, trial.attainment))
    return points
