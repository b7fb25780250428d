"""What the planner says about a candidate: why not one worker less, how much more it carries, and how sure that is.

Each answer is an experiment, not a rule of thumb: what binds is what would make the smaller pools do if it were free.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import Literal

from ..cost_profile import CostProfile
from ..costs import CostModel, DecodeCost
from .result import Policy
from .trials import Candidate, Limits, Trial, Trials, is_pair, noise_between

Constraint = Literal["prefill queue", "decode batch", "KV", "transfer", "none"]
MAX_HEADROOM = 4.0
HEADROOM_STEP = 1.04
SIMPLICITY: tuple[Policy, ...] = ("chunked", "shared", "auto", "disaggregated")  # a flag before an architecture


@dataclass(frozen=True)
class Binding:
    """Which resource forbids one worker less, and the evidence in words."""

    constraint: Constraint
    evidence: str


@dataclass(frozen=True)
class Stability:
    """What became of a choice in draws of the constants from their spreads (a bounded one: from zero to its bound).

    A draw is stable when the pools still meet the SLO and no pool one worker smaller does.
    """

    num_draws: int
    num_stable: int
    num_met: int
    num_smaller_met: int  # one worker less would have done

    def __str__(self) -> str:
        words = f"stable in {self.num_stable} of {self.num_draws} draws of the constants"
        if self.num_met < self.num_draws:
            words += f"; it misses the SLO in {self.num_draws - self.num_met}"
        if self.num_smaller_met:
            words += f"; one worker less would do in {self.num_smaller_met}"
        if 2 * self.num_stable < self.num_draws:
            missed = self.num_draws - self.num_met > self.num_smaller_met
            words += f": it sits on an edge, so {'add a worker, or ' if missed else ''}calibrate longer"
        return words


@dataclass(frozen=True)
class Choice:
    trial: Trial
    cost: float
    binding: Binding
    headroom: float | None  # this many times the rate still meets the SLO; None: not asked for this one
    stability: Stability | None = None  # None: not asked for this one, or the costs have no spreads

    @property
    def candidate(self) -> Candidate:
        return self.trial.candidate


def rank(trials: Iterable[Trial], limits: Limits) -> list[Trial]:
    """Return those that meet the SLO, by cost, then goodput per worker; without those of which smaller pools do too."""
    met = [trial for trial in trials if trial.meets]
    kept = [t for t in met if not any(o is not t and o.candidate.is_within(t.candidate) for o in met)]
    return sorted(kept, key=lambda t: (t.candidate.cost(limits), -t.goodput_per_s / t.candidate.num_workers))


def recommend(ranked: Sequence[Trial], limits: Limits) -> tuple[Trial, str]:
    """Return the trial to build, and why that one: the cheapest; among equals the simplest that is not worse."""
    lowest = ranked[0].candidate.cost(limits)
    equals = [trial for trial in ranked if trial.candidate.cost(limits) <= lowest * (1 + 1e-9)]
    best = max(equals, key=lambda trial: trial.attainment)
    close = [trial for trial in equals if best.attainment - trial.attainment <= noise_between(best, trial)]
    chosen = min(close, key=lambda trial: (SIMPLICITY.index(trial.candidate.policy), -trial.attainment))
    rivals: dict[Policy, Trial] = {}
    for trial in ranked:
        if trial.candidate.policy != chosen.candidate.policy:
            rivals.setdefault(trial.candidate.policy, trial)
    words = f"{chosen.candidate.sizes} is the least that meets the SLO, at a cost of {lowest:g}"
    return chosen, "; ".join([words, *(_against(chosen, rival, limits) for rival in rivals.values())]) + "."


def _against(chosen: Trial, rival: Trial, limits: Limits) -> str:
    name, cost = rival.candidate.policy, rival.candidate.cost(limits)
    if cost > chosen.candidate.cost(limits) * (1 + 1e-9):
        return f"{name} needs {rival.candidate.sizes}, at {cost:g}"
    words = f"{name} costs the same and attains {rival.attainment:.1%} against {chosen.attainment:.1%}"
    difference, noise = abs(rival.attainment - chosen.attainment), noise_between(chosen, rival)
    if difference > noise:
        return words
    words = f"{words}, within the noise of {noise:.1%}" if difference else f"{name} costs and attains the same"
    if is_pair(name) and not is_pair(chosen.candidate.policy):
        words += f", and it is an architecture where {chosen.candidate.policy} is a flag"
    return words


def binding(trials: Trials, candidate: Candidate) -> Binding:
    """Take one worker away where that hurts most, then make one resource after the other free."""
    missing = [trial for smaller in candidate.smaller(trials.limits) if not (trial := trials(smaller)).meets]
    if not missing:
        return Binding("none", "no pool may be smaller, or the smaller one would do too")
    worst = min(missing, key=lambda trial: trial.attainment)
    late_first_token = worst.worst_limit not in ("TPOT", "ITL p99", "largest gap")
    suspects = RESOURCES if late_first_token else (*RESOURCES[:2], *reversed(RESOURCES[2:]))
    freed = [(trials.variant(worst.candidate, resource.free(trials.cost)), resource) for resource in suspects]
    enough = [pair for pair in freed if pair[0].meets]
    relieved, resource = enough[0] if enough else max(freed, key=lambda pair: pair[0].attainment)
    return Binding(
        resource.name,
        f"with {worst.candidate.sizes} the attainment is {worst.attainment:.1%} (most miss {worst.worst_limit}), "
        f"and {relieved.attainment:.1%} if {resource.meaning}",
    )


@dataclass(frozen=True)
class Resource:
    name: Constraint
    meaning: str
    free: Callable[[CostModel], CostModel]  # the costs as they would be if there were no end of it


def _free_transfer(cost: CostModel) -> CostModel:
    return replace(cost, transfer_latency_s=0.0, transfer_bytes_per_s=inf)


def _free_kv(cost: CostModel) -> CostModel:
    prompt, completion = replace(cost.prompt, num_blocks=None), replace(cost.completion, num_blocks=None)
    return replace(cost, prompt=prompt, completion=completion)


def _free_prefill(cost: CostModel) -> CostModel:
    nothing = dict.fromkeys(("floor_s", "overhead_s", "per_token_s", "per_token_sq_s", "per_pass_token_sq_s"), 0.0)
    return replace(cost, **{f"prefill_{key}": value for key, value in nothing.items()})


def _free_batch(cost: CostModel) -> CostModel:
    alone, completion = DecodeCost(cost.decode.base_s), replace(cost.completion, max_num_seqs=None)
    return replace(cost, decode=alone, decode_large=None, decode_knee_sequences=0, completion=completion)


RESOURCES = (  # the most specific first: of several that suffice, the first is named; the last two change places
    # when what is missed is the time between tokens
    Resource("transfer", "transfers took no time", _free_transfer),
    Resource("KV", "the KV caches had no end", _free_kv),
    Resource("prefill queue", "prefill took no time", _free_prefill),
    Resource("decode batch", "a larger batch took no longer", _free_batch),
)


def headroom(trials: Trials, candidate: Candidate) -> float:
    """Return the largest multiple of the rate that still meets the SLO, in steps of 4 %, at most 4 times."""
    levels = [HEADROOM_STEP**i for i in range(1, 99) if HEADROOM_STEP**i < MAX_HEADROOM]

    def meets(index: int) -> bool:
        return trials.variant(candidate, rate=levels[index]).meets

    low, high = -1, len(levels)  # low meets, high does not
    probe = 5
    while high - low > 1:
        low, high = (probe, high) if meets(probe) else (low, probe)
        probe = (low + high) // 2 if high < len(levels) else min(high - 1, 2 * low + 1)
    return levels[low] if low >= 0 else 1.0


def stability(trials: Trials, candidate: Candidate, profile: CostProfile, num_draws: int, seed: int) -> Stability:
    """Try the candidate and what is one worker smaller under draws of the profile's constants."""
    random = Random(seed)
    num_met = num_smaller_met = num_stable = 0
    for _ in range(num_draws):
        draw = trials.under(profile.draw(random))
        is_met = draw(candidate).meets
        smaller_meets = is_met and any(draw(smaller).meets for smaller in candidate.smaller(trials.limits))
        num_met += is_met
        num_smaller_met += smaller_meets
        num_stable += is_met and not smaller_meets
    return Stability(num_draws, num_stable, num_met, num_smaller_met)
