"""Closed forms: what can be said about pool sizes before anything is simulated.

They are estimates of the steady state (queueing theory: Erlang C, Kimura, Allen-Cunneen), and say where the simulator
looks first and why. What no schedule at all can beat is in floors.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, pstdev

from ..costs import CostModel, DecodeCost
from .summary import Slo
from .workload import Request

MAX_UTILISATION = 0.8  # above it, a cost error of 5 % moves the mean TTFT by more than 27 %


@dataclass(frozen=True)
class Demand:
    """What the estimates need to know of a workload."""

    rate_per_s: float
    arrival_cv: float
    prompt_tokens: tuple[int, ...]
    mean_output_tokens: float
    mean_context_tokens: float  # cached tokens of a decoding sequence, averaged over decode steps
    drawn_rates_per_s: tuple[float, ...] = ()  # of each sample, where `rate_per_s` is what they were drawn at

    @property
    def mean_prompt_tokens(self) -> float:
        return fmean(self.prompt_tokens)

    @property
    def offered_per_s(self) -> float | None:
        """The rate that was asked for; None: the requests were recorded, and their rate is their own."""
        return self.rate_per_s if self.drawn_rates_per_s else None


def demand_of(requests: Sequence[Request]) -> Demand:
    """Return the statistics of a workload; a single request has no rate."""
    arrivals = sorted(request.arrival_s for request in requests)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    mean_gap_s = fmean(gaps) if gaps else inf
    outputs = [request.num_output_tokens for request in requests]
    contexts = [request.num_prompt_tokens + request.num_output_tokens / 2 for request in requests]
    return Demand(
        rate_per_s=1 / mean_gap_s if mean_gap_s else inf,
        arrival_cv=pstdev(gaps) / mean_gap_s if gaps and mean_gap_s else 0.0,
        prompt_tokens=tuple(request.num_prompt_tokens for request in requests),
        mean_output_tokens=fmean(outputs),
        mean_context_tokens=sum(n * c for n, c in zip(outputs, contexts, strict=True)) / sum(outputs),
    )


def erlang_c(num_servers: int, offered_load: float) -> float:
    """Return the probability that an arrival must wait in M/M/c; `offered_load` is rate times service time."""
    if offered_load >= num_servers:
        return 1.0
    blocking = 1.0  # Erlang B, by its recursion
    for servers in range(1, num_servers + 1):
        blocking = offered_load * blocking / (servers + offered_load * blocking)
    return blocking / (1 - offered_load / num_servers * (1 - blocking))


def mean_wait_s(
    rate_per_s: float, service_s: float, num_servers: int, *, service_cv: float = 1.0, arrival_cv: float = 1.0
) -> float:
    """Return the mean wait in G/G/c: Kimura's mix of M/M/c and M/D/c, scaled for arrivals as Allen and Cunneen do.

    Exact for M/M/c and M/G/1. Infinite when the servers cannot keep up.
    """
    load = rate_per_s * service_s
    if not load:
        return 0.0
    utilisation = load / num_servers
    if utilisation >= 1:
        return inf
    exponential_s = erlang_c(num_servers, load) * service_s / (num_servers - load)
    cosmetatos = (1 - utilisation) * (num_servers - 1) * (sqrt(4 + 5 * num_servers) - 2)
    constant_s = exponential_s / 2 * (1 + cosmetatos / (16 * utilisation * num_servers))
    cv_sq = service_cv**2
    poisson_s = (1 + cv_sq) / (2 * cv_sq / exponential_s + (1 - cv_sq) / constant_s)
    return poisson_s * (arrival_cv**2 + cv_sq) / (1 + cv_sq)


@dataclass(frozen=True)
class PrefillState:
    """A prefill pool in steady state, one prompt a pass: packing prompts together only improves on it."""

    service_s: float
    offered_load: float  # workers kept busy
    utilisation: float
    wait_s: float
    ttft_s: float  # mean


def prefill_state(demand: Demand, cost: CostModel, num_workers: int) -> PrefillState:
    passes = [cost.sent_pass_s([(0, tokens)]) for tokens in demand.prompt_tokens]
    service_s = fmean(passes)
    service_cv = pstdev(passes) / service_s if service_s else 0.0
    wait_s = mean_wait_s(demand.rate_per_s, service_s, num_workers, service_cv=service_cv, arrival_cv=demand.arrival_cv)
    load = demand.rate_per_s * service_s if service_s else 0.0
    return PrefillState(service_s, load, load / num_workers, wait_s, cost.request_overhead_s + wait_s + service_s)


@dataclass(frozen=True)
class DecodeState:
    """One worker of a decode pool in steady state."""

    step_s: float  # the TPOT
    num_sequences: float

    @property
    def is_stable(self) -> bool:
        return self.step_s < inf


def decode_state(demand: Demand, cost: CostModel, num_workers: int) -> DecodeState:
    """Return where step time and batch meet: a longer step holds sequences longer, which makes the batch larger.

    With r tokens a second and L cached tokens a sequence, `step = base / (1 - r (per sequence + per token L))` and
    `batch = r step`; without bound when the worker cannot keep up with its sequences alone.
    """
    tokens_per_s = demand.rate_per_s * demand.mean_output_tokens / num_workers
    small = _regime_state(cost.decode, tokens_per_s, demand.mean_context_tokens)
    if cost.decode_large is None or small.num_sequences < cost.decode_knee_sequences:
        return small
    large = _regime_state(cost.decode_large, tokens_per_s, demand.mean_context_tokens)
    if large.num_sequences >= cost.decode_knee_sequences:
        return large
    knee = float(cost.decode_knee_sequences)  # between the regimes: the batch swings around the knee
    return DecodeState(knee / tokens_per_s, knee)


def _regime_state(cost: DecodeCost, tokens_per_s: float, context_tokens: float) -> DecodeState:
    alone_s = cost.step_s(1, context_tokens)
    if not tokens_per_s:
        return DecodeState(alone_s, 0.0)
    rest = 1 - tokens_per_s * (cost.per_sequence_s + cost.per_cached_token_s * context_tokens)
    if rest <= 0:
        return DecodeState(inf, inf)
    step_s = max(alone_s, cost.base_s / rest)
    return DecodeState(step_s, tokens_per_s * step_s)


def max_batch(demand: Demand, cost: CostModel) -> float:
    """Return the sequences that one COMPLETION worker runs at once: its limit, or what its KV cache holds."""
    limit = inf if cost.completion.max_num_seqs is None else cost.completion.max_num_seqs
    return min(limit, cost.completion.num_tokens / demand.mean_context_tokens)


def transfer_load(demand: Demand, cost: CostModel, num_links: int) -> float:
    """Return the share of time that each link between a PROMPT and a COMPLETION worker is busy."""
    return demand.rate_per_s * fmean(cost.transfer_s(tokens) for tokens in demand.prompt_tokens) / num_links


@dataclass(frozen=True)
class Estimate:
    """The pool sizes that the steady state asks for; None: more than `max_workers`."""

    num_prompt: int | None
    num_completion: int | None


def estimate_pools(demand: Demand, cost: CostModel, slo: Slo, max_workers: int) -> Estimate:
    """Return the smallest pools below the utilisation limit whose mean TTFT and whose TPOT are within the SLO."""
    ttft_s = inf if slo.ttft_s is None else slo.ttft_s
    batch = max_batch(demand, cost)
    sizes = range(1, max_workers + 1)

    def prefills(size: int) -> bool:
        state = prefill_state(demand, cost, size)
        return state.utilisation <= MAX_UTILISATION and state.ttft_s <= ttft_s

    def decodes(size: int) -> bool:
        state = decode_state(demand, cost, size)
        return state.is_stable and state.step_s <= step_limit_s(slo) and state.num_sequences <= batch

    return Estimate(next(filter(prefills, sizes), None), next(filter(decodes, sizes), None))


def step_limit_s(slo: Slo) -> float:
    """Return the tightest limit that the SLO puts on a decode step."""
    limits = (slo.tpot_s, slo.itl_p99_s, slo.max_gap_s)
    return min((limit for limit in limits if limit is not None), default=inf)
