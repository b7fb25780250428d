"""Synthetic workloads: arrivals of a rate and a burstiness, lengths of a distribution, all from one seed.

The same seed at another rate gives the same requests, closer together: what two candidates are compared on differs in
nothing else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, fsum, inf, log, log1p, sqrt
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean, pstdev
from typing import Literal

from ..protocol.errors import ConfigError
from .summary import nearest_rank
from .traces import read_trace
from .workload import Request

MAX_BURSTINESS = 100.0  # beyond it one burst holds ten thousand requests, and no run is long enough to be typical
MIN_BURSTINESS = 1e-3  # below it arrivals are constant: no run shows the difference, and the gamma generator fails
MAX_REQUESTS = 10_000_000
MAX_LENGTH = 10_000_000
MAX_CV = 100.0
ARRIVAL_DIGITS = 9  # nanoseconds: what machines' logarithms disagree about is rounded away
Z99 = NormalDist().inv_cdf(0.99)
LENGTHS_HELP = (
    "Tokens: 1000 (constant), 200-800 (uniform, both ends included), lognormal:1000,0.8 (mean, coefficient of "
    "variation), lognormal:1000,p99=4000 (mean, 99th percentile), trace:FILE (drawn from a trace's lengths)."
)


@dataclass(frozen=True)
class ConstantLengths:
    num_tokens: int

    def __post_init__(self) -> None:
        _check_length("num_tokens", self.num_tokens)

    def draw(self, random: Random) -> int:
        return self.num_tokens


@dataclass(frozen=True)
class UniformLengths:
    """Both ends are included."""

    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        _check_length("min_tokens", self.min_tokens)
        _check_length("max_tokens", self.max_tokens, self.min_tokens)

    def draw(self, random: Random) -> int:
        return random.randint(self.min_tokens, self.max_tokens)


@dataclass(frozen=True)
class LognormalLengths:
    """Rounded to whole tokens, and never fewer than one."""

    mean_tokens: float
    cv: float  # standard deviation / mean

    def __post_init__(self) -> None:
        _check_length("mean_tokens", self.mean_tokens)
        _check(0 <= self.cv <= MAX_CV, "cv", self.cv, f"0 to {MAX_CV:g}")

    @classmethod
    def from_p99(cls, mean_tokens: float, p99_tokens: float) -> "LognormalLengths":
        """Return the distribution with that mean and 99th percentile, the narrower of the two that have them."""
        _check_length("mean_tokens", mean_tokens)
        most = mean_tokens * exp(Z99**2 / 2)
        _check(mean_tokens <= p99_tokens <= most, "p99_tokens", p99_tokens, f"{mean_tokens:g} to {most:.0f}")
        sigma = Z99 - sqrt(Z99**2 - 2 * log(p99_tokens / mean_tokens))
        return cls(mean_tokens, sqrt(exp(sigma**2) - 1))

    def draw(self, random: Random) -> int:
        variance = log1p(self.cv**2)
        return max(1, round(random.lognormvariate(log(self.mean_tokens) - variance / 2, sqrt(variance))))


@dataclass(frozen=True)
class EmpiricalLengths:
    """Drawn from lengths that occurred, each as likely as it was frequent; prompts and outputs independently."""

    observed: tuple[int, ...] = field(repr=False)

    def __post_init__(self) -> None:
        _check(len(self.observed) > 0, "observed", "empty", "at least one length")
        for num_tokens in self.observed:
            _check_length("observed", num_tokens)

    def draw(self, random: Random) -> int:
        return random.choice(self.observed)


Lengths = ConstantLengths | UniformLengths | LognormalLengths | EmpiricalLengths


@dataclass(frozen=True)
class Workload:
    """What to generate. Exactly one of `num_requests` and `duration_s` says how much."""

    rate_per_s: float
    prompt: Lengths
    output: Lengths
    burstiness: float = 1.0  # CV of the gamma-distributed times between arrivals: 1 Poisson, 0 constant
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check(0 < self.rate_per_s < inf, "rate_per_s", self.rate_per_s, "greater than 0")
        _check(0 <= self.burstiness <= MAX_BURSTINESS, "burstiness", self.burstiness, f"0 to {MAX_BURSTINESS:g}")
        if (self.num_requests is None) == (self.duration_s is None):
            raise ConfigError("exactly one of num_requests and duration_s must be given")
        if self.num_requests is not None:
            allowed = f"1 to {MAX_REQUESTS}"
            _check(1 <= self.num_requests <= MAX_REQUESTS, "num_requests", self.num_requests, allowed)
        if self.duration_s is not None:
            most = MAX_REQUESTS / self.rate_per_s
            _check(0 < self.duration_s <= most, "duration_s", self.duration_s, f"greater than 0, at most {most:g}")


def generate(spec: Workload) -> list[Request]:
    """Return the requests in order of arrival, the first at 0. The same spec gives the same requests everywhere."""
    # One stream of random numbers each, so that changing one distribution changes nothing else.
    gaps, prompts, outputs = (Random(f"{spec.seed} {use}") for use in ("gaps", "prompts", "outputs"))
    requests: list[Request] = []
    unit_s = 0.0  # at a rate of one a second
    while spec.num_requests is None or len(requests) < spec.num_requests:
        arrival_s = round(unit_s / spec.rate_per_s, ARRIVAL_DIGITS)
        if spec.duration_s is not None and arrival_s >= spec.duration_s:
            break
        lengths = spec.prompt.draw(prompts), spec.output.draw(outputs)
        requests.append(Request(f"r{len(requests)}", arrival_s, *lengths))
        unit_s += _unit_gap_s(gaps, spec.burstiness)
    return requests


def _unit_gap_s(random: Random, burstiness: float) -> float:
    variance = burstiness**2
    return random.gammavariate(1 / variance, variance) if burstiness >= MIN_BURSTINESS else 1.0


def parse_lengths(text: str, side: Literal["prompt", "output"] = "prompt") -> Lengths:
    """Read what `LENGTHS_HELP` describes; `side` says which of a trace's lengths are meant."""
    kind, colon, rest = text.strip().partition(":")
    try:
        if colon and kind == "trace":
            return _from_trace(Path(rest), side)
        if colon and kind == "lognormal":
            return _lognormal(rest)
        low, dash, high = text.partition("-")
        return UniformLengths(int(low), int(high)) if dash else ConstantLengths(int(low))
    except ValueError as error:
        raise ConfigError(f"{side} lengths are {text!r}, which means nothing", hint=LENGTHS_HELP) from error
    except ConfigError as error:
        raise ConfigError(f"{side} lengths {text!r}: {error.message}", hint=error.hint) from error


def _from_trace(path: Path, side: Literal["prompt", "output"]) -> EmpiricalLengths:
    requests = read_trace(path)
    if side == "prompt":
        return EmpiricalLengths(tuple(request.num_prompt_tokens for request in requests))
    return EmpiricalLengths(tuple(request.num_output_tokens for request in requests))


def _lognormal(text: str) -> LognormalLengths:
    mean, _, width = text.partition(",")
    if width.strip().startswith("p99="):
        return LognormalLengths.from_p99(float(mean), float(width.strip().removeprefix("p99=")))
    return LognormalLengths(float(mean), float(width))


@dataclass(frozen=True)
class LengthStatistics:
    mean: float
    p50: float
    p99: float
    max: int


@dataclass(frozen=True)
class WorkloadStatistics:
    """`rate_per_s` and `burstiness` are None where fewer than two moments of arrival leave them undefined."""

    num_requests: int
    duration_s: float  # first to last arrival
    rate_per_s: float | None
    burstiness: float | None  # CV of the times between arrivals
    prompt: LengthStatistics
    output: LengthStatistics


def describe(requests: Sequence[Request]) -> WorkloadStatistics:
    """Return a workload's statistics; percentiles are nearest ranks. Raises ConfigError when it is empty."""
    if not requests:
        raise ConfigError("the workload holds no requests")
    arrivals = sorted(request.arrival_s for request in requests)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    mean_gap_s = fsum(gaps) / len(gaps) if gaps else 0.0
    return WorkloadStatistics(
        num_requests=len(requests),
        duration_s=arrivals[-1] - arrivals[0],
        rate_per_s=1 / mean_gap_s if mean_gap_s else None,
        burstiness=pstdev(gaps, mean_gap_s) / mean_gap_s if mean_gap_s else None,
        prompt=_length_statistics(request.num_prompt_tokens for request in requests),
        output=_length_statistics(request.num_output_tokens for request in requests),
    )


def _length_statistics(lengths: Iterable[int]) -> LengthStatistics:
    ordered = sorted(lengths)
    return LengthStatistics(fmean(ordered), nearest_rank(ordered, 50), nearest_rank(ordered, 99), ordered[-1])


def _check(is_allowed: bool, key: str, value: object, allowed: str) -> None:
    if not is_allowed:
        raise ConfigError(f"{key} is {value}, must be {allowed}")


def _check_length(key: str, num_tokens: float, least: int = 1) -> None:
    _check(least <= num_tokens <= MAX_LENGTH, key, num_tokens, f"{least} to {MAX_LENGTH}")
