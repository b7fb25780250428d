"""The planner: from a workload, measured costs, an SLO and limits to pool sizes, ranked and explained.

    plan(requests, load_profile(path), Slo(ttft_s=0.5, tpot_s=0.06), Limits(max_workers=16))

Closed forms say where to look and what no pools can do; the simulator decides, on the same requests for all candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import fmean
from typing import Any

from ..cost_profile import CostProfile
from ..costs import CostModel
from ..protocol.errors import ConfigError
from .bounds import Demand, Estimate, decode_state, demand_of, estimate_pools, max_batch, prefill_state, transfer_load
from .floors import served_alone
from .ranking import Choice, Stability, binding, headroom, rank, recommend, stability
from .search import search
from .summary import Distribution, Slo, Summary
from .trials import Candidate, Limits, Trial, Trials, is_startable
from .units import counted, format_s
from .workload import Request

NUM_WITH_HEADROOM = 3

Progress = Callable[[Candidate], None]  # called after every candidate that was simulated


@dataclass(frozen=True)
class Effort:
    """How much to say. More samples than one come with the workload."""

    num_ranked: int = 5
    num_draws: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for key, least in (("num_ranked", 1), ("num_draws", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"{key} is {getattr(self, key)}, must be at least {least}")


@dataclass(frozen=True)
class Plan:
    """What to build, and everything that led to it. Infeasible when nothing is recommended: `reason` says why."""

    slo: Slo
    limits: Limits
    demand: Demand
    estimate: Estimate
    explanation: tuple[str, ...]  # the closed forms in words
    reason: str = ""
    trials: tuple[Trial, ...] = ()  # in the order they were simulated
    ranked: tuple[Choice, ...] = ()
    recommended: Choice | None = None
    startable: Choice | None = None  # the best that Twinpool can run today: what a cluster spec can hold

    @property
    def is_feasible(self) -> bool:
        return self.recommended is not None

    @property
    def stability(self) -> Stability | None:
        """That of the recommended; None without a profile's spreads, or when infeasible."""
        return None if self.recommended is None else self.recommended.stability

    def to_json(self) -> dict[str, Any]:
        """Return plain values; units are in the keys."""
        return {
            "is_feasible": self.is_feasible,
            "reason": self.reason,
            "recommended": None if self.recommended is None else choice_json(self.recommended),
            "startable": None if self.startable is None else choice_json(self.startable),
            "stability": None if self.stability is None else asdict(self.stability),
            "ranked": [choice_json(choice) for choice in self.ranked],
            "slo": asdict(self.slo),
            "limits": asdict(self.limits),
            "demand": _demand_json(self.demand),
            "closed_form": {**asdict(self.estimate), "explanation": list(self.explanation)},
            "trials": [{**asdict(t.candidate), "attainment": t.attainment} for t in self.trials],
        }


def _demand_json(demand: Demand) -> dict[str, Any]:
    return {
        "rate_per_s": demand.rate_per_s if demand.rate_per_s < inf else None,  # None: all at once
        "drawn_rates_per_s": list(demand.drawn_rates_per_s),  # empty: a recorded workload
        "arrival_cv": demand.arrival_cv,
        "mean_prompt_tokens": demand.mean_prompt_tokens,
        "mean_output_tokens": demand.mean_output_tokens,
        "mean_context_tokens": demand.mean_context_tokens,
    }


def choice_json(choice: Choice) -> dict[str, Any]:
    trial = choice.trial
    return {
        **asdict(choice.candidate),
        "cost": choice.cost,
        "attainment": trial.attainment,
        "attainment_noise": trial.noise,
        "goodput_per_s": trial.goodput_per_s,
        "goodput_per_worker_per_s": trial.goodput_per_s / choice.candidate.num_workers,
        **{key: _percentiles(trial, key) for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
        "max_gap_s": trial.mean(lambda summary: summary.max_gap_s),
        "busy_shares": trial.busy_shares,
        "headroom": choice.headroom,
        "binding": asdict(choice.binding),
        "stability": None if choice.stability is None else asdict(choice.stability),
    }


def percentile_s(trial: Trial, key: str, percentile: str) -> float | None:
    """Return a figure such as ("ttft_s", "p90"), the mean over the samples."""

    def figure(summary: Summary) -> float | None:
        distribution: Distribution = getattr(summary, key)
        value: float | None = getattr(distribution, percentile)
        return value

    return trial.mean(figure)


def _percentiles(trial: Trial, key: str) -> dict[str, float | None]:
    return {percentile: percentile_s(trial, key, percentile) for percentile in ("mean", "p50", "p90", "p99")}


def plan(
    requests: Sequence[Request],
    costs: CostProfile | CostModel,
    slo: Slo,
    limits: Limits | None = None,
    *,
    more_samples: Sequence[Sequence[Request]] = (),
    offered_per_s: float | None = None,
    effort: Effort | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """Size the pools for a workload.

    `more_samples` are further draws of the same workload, where it is a distribution: every candidate runs on all of
    them, so that no single phase of arrival decides. `offered_per_s` is the rate that they were drawn at: by
    chance each has another. Raises ConfigError for an empty workload or an SLO without limits.
    """
    samples = [requests, *more_samples]
    _check(samples, slo)
    limits, effort, report = limits or Limits(), effort or Effort(), on_progress or _ignore
    model = costs.model() if isinstance(costs, CostProfile) else costs
    demand = demand_of(requests)
    if offered_per_s is not None:
        drawn_per_s = tuple(demand_of(sample).rate_per_s for sample in samples)
        demand = replace(demand, rate_per_s=offered_per_s, drawn_rates_per_s=drawn_per_s)
    estimate = estimate_pools(demand, model, slo, limits.max_workers)
    blank = Plan(slo, limits, demand, estimate, explain(demand, model, estimate))
    alone = [served_alone(sample, model, slo) for sample in samples]
    if fmean(one.attainment for one in alone) < slo.attainment:
        return replace(blank, reason="no pool size helps: " + next(one.reasons for one in alone if one.reasons)[0])
    trials = Trials(samples, model, slo, limits, report, offered_per_s=offered_per_s)
    lows = search(trials, demand)
    ranked = rank(trials.all(), limits)
    blank = replace(blank, trials=tuple(trials.all()))
    if not ranked:
        return replace(blank, reason=_too_small(blank.trials, limits, lows))
    return _explained(blank, ranked, trials, costs, effort)


def _explained(
    blank: Plan, ranked: list[Trial], trials: Trials, costs: CostProfile | CostModel, effort: Effort
) -> Plan:
    """Run the experiments that say why, on those that are shown."""
    chosen, reason = recommend(ranked, blank.limits)
    startables = [trial for trial in ranked if is_startable(trial.candidate.policy)]
    profile = costs if isinstance(costs, CostProfile) and effort.num_draws else None
    known: dict[Candidate, Choice] = {}

    def choice(trial: Trial, with_headroom: bool, with_stability: bool = False) -> Choice:
        candidate = trial.candidate
        if candidate not in known:
            more = headroom(trials, candidate) if with_headroom else None
            stable = None
            if profile is not None and with_stability:
                stable = stability(trials, candidate, profile, effort.num_draws, effort.seed)
            known[candidate] = Choice(trial, candidate.cost(blank.limits), binding(trials, candidate), more, stable)
        return known[candidate]

    recommended = choice(chosen, True, True)
    startable = choice(startables[0], True, True) if startables else None
    shown = tuple(choice(trial, i < NUM_WITH_HEADROOM) for i, trial in enumerate(ranked[: effort.num_ranked]))
    return replace(blank, ranked=shown, recommended=recommended, startable=startable, reason=reason)


def explain(demand: Demand, cost: CostModel, estimate: Estimate) -> tuple[str, ...]:
    """Say in words what the closed forms find, at the sizes that they ask for."""
    alone = prefill_state(demand, cost, 1)
    links = (estimate.num_prompt or 1) * (estimate.num_completion or 1)
    return (
        f"{_rate_words(demand)}; prompts of {demand.mean_prompt_tokens:,.0f} and outputs of "
        f"{demand.mean_output_tokens:,.0f} tokens on average; times between arrivals have a CV of "
        f"{demand.arrival_cv:.2f}.",
        f"Prefill takes {format_s(alone.service_s)} a prompt, which keeps {alone.offered_load:.2f} workers busy; "
        + _prefill_words(demand, cost, estimate.num_prompt),
        "Decode: " + _decode_words(demand, cost, estimate.num_completion),
        f"Transfers keep each link between two such workers {transfer_load(demand, cost, links):.1%} busy.",
    )


def _rate_words(demand: Demand) -> str:
    if not demand.drawn_rates_per_s:
        return f"{demand.rate_per_s:.3g} requests/s"
    drawn = ", ".join(f"{rate_per_s:.3g}" for rate_per_s in demand.drawn_rates_per_s)
    return f"{demand.rate_per_s:g} requests/s offered (drawn: {drawn})"


def _prefill_words(demand: Demand, cost: CostModel, num: int | None) -> str:
    if num is None:
        return "as many PROMPT workers as are allowed settle at no mean TTFT within the SLO."
    state = prefill_state(demand, cost, num)
    return f"{num} PROMPT would settle at {state.utilisation:.0%} busy and a mean TTFT of {format_s(state.ttft_s)}."


def _decode_words(demand: Demand, cost: CostModel, num: int | None) -> str:
    if num is None:
        return "as many COMPLETION workers as are allowed settle at no step within the SLO and the KV cache."
    state, most = decode_state(demand, cost, num), max_batch(demand, cost)
    return (
        f"{num} COMPLETION would settle at {state.num_sequences:.1f} sequences each, of {most:,.0f} that fit, and a "
        f"step of {format_s(state.step_s)}."
    )


def _too_small(trials: Sequence[Trial], limits: Limits, lows: tuple[int, int]) -> str:
    limit = f"a limit of {counted(limits.max_workers, 'worker')} is too low"
    if not trials:
        return (
            f"{limit}: whatever the schedule, the work in time for the SLO keeps "
            f"{lows[0]} PROMPT and {lows[1]} COMPLETION workers busy"
        )
    best = max(trials, key=lambda trial: trial.attainment)
    return (
        f"{limit}, or these policies do not suit: the best of {counted(len(trials), 'candidate')}, "
        f"{best.candidate.label}, attains {best.attainment:.1%} of the {best.slo.attainment:.0%} wanted, "
        f"and most miss {best.worst_limit}"
    )


def _check(samples: Sequence[Sequence[Request]], slo: Slo) -> None:
    if not all(samples):
        raise ConfigError("the workload holds no requests")
    if not slo.limits():
        raise ConfigError("the SLO sets no limit", hint="set ttft_s, and tpot_s, itl_p99_s or max_gap_s")


def _ignore(candidate: Candidate) -> None:
    del candidate
