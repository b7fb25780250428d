"""What no schedule can beat: bounds that hold for this very workload, whatever its workers do.

An SLO that they exclude is infeasible, with the reason, and a pool that they call too small is never simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from ..costs import CostModel
from .summary import Slo
from .units import format_s
from .workload import Request


@dataclass(frozen=True)
class Alone:
    """What becomes of a workload's requests when each has an idle cluster to itself: no pools do better."""

    attainment: float
    reasons: tuple[str, ...]  # of each limit that too many requests miss even so


def served_alone(requests: Sequence[Request], cost: CostModel, slo: Slo) -> Alone:
    """Return the attainment that no pool size can exceed, and why, where that is below the SLO's."""
    steps_s = [_fastest_step_s(cost, request) if request.num_output_tokens > 1 else 0.0 for request in requests]
    gap_s = min((limit for limit in (slo.tpot_s, slo.max_gap_s) if limit is not None), default=inf)
    needs = [
        _Need("TTFT", [cost.request_overhead_s + cost.prefill_s(r.num_prompt_tokens) for r in requests], slo.ttft_s),
        _Need("largest gap" if gap_s == slo.max_gap_s else "TPOT", steps_s, gap_s),
        _Need("KV", [r.num_prompt_tokens + r.num_output_tokens for r in requests], cost.completion.num_tokens),
    ]
    num_met = sum(all(need.is_met(i) for need in needs) for i in range(len(requests)))
    reasons = _itl_reasons(requests, steps_s, slo)
    attainment = 0.0 if reasons else num_met / len(requests)
    if attainment < slo.attainment:
        rank = ceil(slo.attainment * len(requests) - 1e-9) - 1
        reasons += [reason for need in needs if (reason := need.reason(requests, rank, slo.attainment))]
        reasons = reasons or ["different requests miss different limits, together more than are allowed to"]
    return Alone(attainment, tuple(reasons))


@dataclass(frozen=True)
class _Need:
    """What each request needs of one thing at least, and how much of it there is."""

    name: str
    values: Sequence[float]
    limit: float | None

    def is_met(self, index: int) -> bool:
        return self.limit is None or self.values[index] <= self.limit

    def reason(self, requests: Sequence[Request], rank: int, attainment: float) -> str | None:
        """Say what the request at that rank needs; None when it gets it."""
        index = sorted(range(len(self.values)), key=self.values.__getitem__)[rank]
        if self.is_met(index):
            return None
        assert self.limit is not None
        prompt, output = requests[index].num_prompt_tokens, requests[index].num_output_tokens
        share = f"{attainment:.0%} of the requests must meet it, and the one at that rank has"
        if self.name == "KV":
            what = f"a COMPLETION worker's cache holds {self.limit:,.0f} tokens"
            return f"KV: {what}; {share} {prompt:,} prompt and {output:,} output tokens"
        took = f"takes {format_s(self.values[index])}, over the limit of {format_s(self.limit)}"
        if self.name == "TTFT":
            return f"TTFT: the prefill alone {took}; {share} {prompt:,} prompt tokens"
        return f"{self.name}: a decode step alone {took}; {share} about {prompt + output // 2:,} cached tokens"


def _itl_reasons(requests: Sequence[Request], steps_s: Sequence[float], slo: Slo) -> list[str]:
    """The p99 of the gaps is one figure of the whole run: where it is missed, all requests miss it."""
    if slo.itl_p99_s is None:
        return []
    gaps = sorted((step_s, r.num_output_tokens - 1) for step_s, r in zip(steps_s, requests, strict=True))
    allowed = sum(num for _, num in gaps) * 0.01
    num_over = sum(num for step_s, num in gaps if step_s > slo.itl_p99_s)
    if num_over <= allowed:
        return []
    return [
        f"ITL p99: a decode step alone takes {format_s(gaps[-1][0])} at most, and {num_over:,} of the "
        f"{allowed * 100:,.0f} gaps are over the limit of {format_s(slo.itl_p99_s)}"
    ]


def min_prompt_workers(requests: Sequence[Request], cost: CostModel, slo: Slo) -> int:
    """Return a size below which the prefill pool cannot finish enough prompts in time, however it packs them."""
    if slo.ttft_s is None:
        return 1
    budget = cost.prompt.max_num_batched_tokens
    per_token_s = cost.prefill_per_token_s + (cost.prefill_overhead_s / budget if budget else 0.0)
    works_s = [
        per_token_s * r.num_prompt_tokens + cost.prefill_per_token_sq_s * r.num_prompt_tokens**2 for r in requests
    ]
    return _workers_for(works_s, slo.attainment, _span_s(requests) + slo.ttft_s)


def min_completion_workers(requests: Sequence[Request], cost: CostModel, slo: Slo) -> int:
    """Return a size below which the decode pool cannot make enough tokens in time, however full its batches are."""
    gap_s = min((limit for limit in (slo.tpot_s, slo.max_gap_s) if limit is not None), default=None)
    if slo.ttft_s is None or gap_s is None:
        return 1
    batch = cost.completion.max_num_seqs or inf
    regimes = [cost.decode] if cost.decode_large is None else [cost.decode, cost.decode_large]

    def work_s(request: Request) -> float:
        context = request.num_prompt_tokens + request.num_output_tokens / 2
        return (request.num_output_tokens - 1) * min(
            regime.base_s / batch + regime.per_sequence_s + regime.per_cached_token_s * context for regime in regimes
        )

    longest_s = gap_s * max(r.num_output_tokens for r in requests)
    return _workers_for([work_s(r) for r in requests], slo.attainment, _span_s(requests) + slo.ttft_s + longest_s)


def _workers_for(works_s: list[float], attainment: float, time_s: float) -> int:
    """Return how many workers the cheapest requests that suffice for the attainment keep busy for the whole time."""
    needed = sorted(works_s)[: ceil(attainment * len(works_s) - 1e-9)]
    return max(1, ceil(sum(needed) / time_s - 1e-9)) if time_s else 1


def _span_s(requests: Sequence[Request]) -> float:
    arrivals = [request.arrival_s for request in requests]
    return max(arrivals) - min(arrivals)


def _fastest_step_s(cost: CostModel, request: Request) -> float:
    """Return the mean step of a request that nothing else slows; a large-batch regime may be the faster one."""
    context = request.num_prompt_tokens + request.num_output_tokens / 2
    steps = [cost.decode.step_s(1, context)]
    if cost.decode_large is not None:
        steps.append(cost.decode_large.step_s(max(1, cost.decode_knee_sequences), context))
    return min(steps)
