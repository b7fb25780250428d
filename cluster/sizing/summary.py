"""What a run was worth: percentiles, the share of requests that met their limits, and what the workers cost.

Percentiles are nearest ranks: a value that occurred, the smallest that at least p % of all do not exceed. Attainment
counts every request that arrived; one that was refused, or had not finished when the run ended, has missed.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from math import fsum, inf
from typing import Any

from ..protocol.errors import ConfigError
from .result import Outcome, Run
from .workload import Request

PERCENTS = (50, 90, 99)
REFUSED, UNFINISHED = "refused", "unfinished"  # beside the limits' names: why a request missed
LIMIT_WORDS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_p99_s": "ITL p99", "max_gap_s": "largest gap"}


@dataclass(frozen=True)
class Slo:
    """Limits that a share of `attainment` of all requests has to meet. None: no limit.

    A mean TPOT hides one long stall; `max_gap_s` is each request's longest gap, and `itl_p99_s` is judged on the gaps
    of the whole run: when it is missed nobody can say whose gaps are to blame, and every request counts as missed.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None  # met by a request of a single token, which has none
    itl_p99_s: float | None = None
    max_gap_s: float | None = None
    attainment: float = 0.9

    def __post_init__(self) -> None:
        for key, limit in self.limits().items():
            if not 0 < limit < inf:
                raise ConfigError(f"slo: {key} is {limit}, must be greater than 0")
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"slo: attainment is {self.attainment}, must be greater than 0 and at most 1")

    def limits(self) -> dict[str, float]:
        """Return the limits that are set."""
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "attainment"}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class Distribution:
    """`num` values, seconds; the rest is None when there are none."""

    num: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


@dataclass(frozen=True)
class Refusal:
    """Requests that were refused for one reason; the rest is of the first of them."""

    reason: str
    num: int
    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Summary:
    """A run's figures; all but those marked "whole run" leave out the requests that arrived during the warm-up.

    The four stages add up to each request's TTFT. `transfer_s` is what the first token waited for the KV: nothing
    where it came from the prefill, or where the KV was there already. `decode_wait_s` is the rest.
    """

    policy: str
    num_workers: int
    num_arrived: int
    num_finished: int
    num_refused: int
    num_preemptions: int
    arrivals_per_s: float | None  # None for fewer than two moments of arrival
    ttft_s: Distribution
    queue_s: Distribution
    prefill_s: Distribution
    transfer_s: Distribution
    decode_wait_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution  # whole run: gaps are counted, not kept by request
    e2e_s: Distribution
    max_gap_s: float | None  # None when nothing sent two tokens
    slo: Slo | None
    slo_attainment: float | None  # share of the arrived; None without an SLO or arrivals
    goodput_per_s: float | None  # attainment x arrivals_per_s: attaining requests a second
    goodput_per_worker_per_s: float | None
    missed: Mapping[str, int]  # requests by what they missed: each limit, refused, unfinished; one may count twice
    requests_per_s: float | None  # finished ones, from the first arrival to the run's end
    output_tokens_per_s: float | None
    gpu_s: float  # whole run: busy, transfers included
    worker_s: float  # whole run: busy or not
    refusals: tuple[Refusal, ...] = ()

    @property
    def is_slo_met(self) -> bool | None:
        if self.slo is None or self.slo_attainment is None:
            return None
        return self.slo_attainment >= self.slo.attainment

    @property
    def binding_limit(self) -> str | None:
        """What most requests missed: a limit of the SLO, "refused" or "unfinished"; None when all met everything."""
        worst = max(self.missed, key=lambda key: self.missed[key], default=None)
        return worst if worst is not None and self.missed[worst] else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, None for what is undefined, always in the same order."""
        refusals = [asdict(refusal) for refusal in self.refusals]
        judged = {"is_slo_met": self.is_slo_met, "binding_limit": self.binding_limit}
        return {**asdict(self), "refusals": refusals, **judged}


def summarize(run: Run, slo: Slo | None = None, warmup_s: float = 0.0) -> Summary:
    """Sum a run up, from the requests that arrived at `warmup_s` or later."""
    if not 0 <= warmup_s < inf:
        raise ConfigError(f"warmup_s is {warmup_s}, must be at least 0")
    outcomes = [outcome for outcome in run.outcomes if outcome.request.arrival_s >= warmup_s]
    queue_s, prefill_s, transfer_s, decode_wait_s = _stage_distributions(outcomes)
    itl_s = weighted_distribution(run.gaps)
    missed = [_missed(outcome, slo, itl_s.p99) for outcome in outcomes] if slo is not None else []
    attainment = missed.count(()) / len(missed) if missed else None
    arrivals_per_s = _arrivals_per_s(outcomes)
    goodput_per_s = None if attainment is None or arrivals_per_s is None else attainment * arrivals_per_s
    finished = [outcome for outcome in outcomes if outcome.is_finished]
    elapsed_s = run.end_s - min((outcome.request.arrival_s for outcome in outcomes), default=run.end_s)
    return Summary(
        policy=run.policy,
        num_workers=run.num_workers,
        num_arrived=len(outcomes),
        num_finished=len(finished),
        num_refused=sum(outcome.refused is not None for outcome in outcomes),
        num_preemptions=sum(outcome.num_preemptions for outcome in outcomes),
        arrivals_per_s=arrivals_per_s,
        ttft_s=distribution(outcome.ttft_s for outcome in outcomes),
        queue_s=queue_s,
        prefill_s=prefill_s,
        transfer_s=transfer_s,
        decode_wait_s=decode_wait_s,
        tpot_s=distribution(outcome.tpot_s for outcome in outcomes),
        itl_s=itl_s,
        e2e_s=distribution(outcome.e2e_s for outcome in outcomes),
        max_gap_s=max((outcome.max_gap_s for outcome in outcomes if outcome.num_tokens > 1), default=None),
        slo=slo,
        slo_attainment=attainment,
        goodput_per_s=goodput_per_s,
        goodput_per_worker_per_s=None if goodput_per_s is None else goodput_per_s / run.num_workers,
        missed=_count(missed, slo),
        requests_per_s=len(finished) / elapsed_s if elapsed_s > 0 else None,
        output_tokens_per_s=sum(outcome.num_tokens for outcome in outcomes) / elapsed_s if elapsed_s > 0 else None,
        gpu_s=run.gpu_s,
        worker_s=run.num_workers * run.end_s,
        refusals=_refusals(outcomes),
    )


def met_requests(run: Run, slo: Slo) -> tuple[bool, ...]:
    """Say of each request, in the run's order, whether it kept every limit."""
    itl_p99_s = None if slo.itl_p99_s is None else weighted_distribution(run.gaps).p99
    return tuple(not _missed(outcome, slo, itl_p99_s) for outcome in run.outcomes)


def ttft_stages_s(outcome: Outcome) -> tuple[float, float, float, float] | None:
    """Return (queue, prefill, transfer, decode wait), which add up to the TTFT; None without a first token."""
    first_s, start_s, end_s = outcome.first_token_s, outcome.prefill_start_s, outcome.prefill_end_s
    if first_s is None or start_s is None or end_s is None:
        return None
    end_s = min(end_s, first_s)
    kv_s = outcome.transfer_end_s
    if kv_s is None or not end_s < kv_s <= first_s:
        kv_s = end_s
    return start_s - outcome.request.arrival_s, end_s - start_s, kv_s - end_s, first_s - kv_s


def nearest_rank(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest of the ascending values that at least `percent` of them do not exceed."""
    return ordered[_rank(len(ordered), percent) - 1]


def distribution(values: Iterable[float | None]) -> Distribution:
    """Sum up the values that are there."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Distribution()
    p50, p90, p99 = (nearest_rank(ordered, percent) for percent in PERCENTS)
    return Distribution(len(ordered), fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def weighted_distribution(counts: Mapping[float, int]) -> Distribution:
    """Sum up values of which each occurred so many times."""
    ordered = sorted(value for value, count in counts.items() if count)
    if not ordered:
        return Distribution()
    up_to = list(accumulate(counts[value] for value in ordered))
    num = up_to[-1]
    p50, p90, p99 = (ordered[bisect_left(up_to, _rank(num, percent))] for percent in PERCENTS)
    mean = fsum(value * counts[value] for value in ordered) / num
    return Distribution(num, mean, p50, p90, p99, ordered[-1])


def _rank(num: int, percent: int) -> int:
    return max(1, -(-num * percent // 100))


def _stage_distributions(outcomes: Sequence[Outcome]) -> list[Distribution]:
    stages = [stage for outcome in outcomes if (stage := ttft_stages_s(outcome)) is not None]
    return [distribution(stage[i] for stage in stages) for i in range(4)]


def _missed(outcome: Outcome, slo: Slo, itl_p99_s: float | None) -> tuple[str, ...]:
    """Return the limits that a request missed; one without a first token has missed that of its TTFT too."""
    if outcome.refused is not None:
        return (REFUSED,)
    ttft_s = inf if outcome.first_token_s is None else outcome.ttft_s
    actual = {"ttft_s": ttft_s, "tpot_s": outcome.tpot_s, "itl_p99_s": itl_p99_s, "max_gap_s": outcome.max_gap_s}
    limits = [key for key, limit in slo.limits().items() if (value := actual[key]) is not None and value > limit]
    return tuple(limits) if outcome.is_finished else (*limits, UNFINISHED)


def _refusals(outcomes: Iterable[Outcome]) -> tuple[Refusal, ...]:
    grouped: dict[str, list[Request]] = {}
    for outcome in outcomes:
        if outcome.refused is not None:
            grouped.setdefault(outcome.refused, []).append(outcome.request)
    return tuple(
        Refusal(reason, len(all_), all_[0].request_id, all_[0].num_prompt_tokens, all_[0].num_output_tokens)
        for reason, all_ in grouped.items()
    )


def _count(missed: Iterable[tuple[str, ...]], slo: Slo | None) -> dict[str, int]:
    if slo is None:
        return {}
    counts = Counter(name for names in missed for name in names)
    return {name: counts[name] for name in (*slo.limits(), REFUSED, UNFINISHED)}


def _arrivals_per_s(outcomes: Sequence[Outcome]) -> float | None:
    arrivals = [outcome.request.arrival_s for outcome in outcomes]
    window_s = max(arrivals) - min(arrivals) if arrivals else 0.0
    return (len(arrivals) - 1) / window_s if window_s else None
