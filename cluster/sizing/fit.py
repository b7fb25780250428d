"""From timed passes to the constants of the cost model. Pure: numbers in, constants out.

Every function returns constants under their keys in the profile. A structure that needs more constants (a floor under
short passes, a second regime of large batches) is taken only where it describes the samples clearly better.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import get_args

import numpy as np

from ..cost_profile import Constant, FuseChoice
from ..costs import CostModel, FuseRule, Row
from .least_squares import (
    Array,
    Fit,
    Sample,
    as_arrays,
    fit_terms,
    noise_of,
    relative_errors,
    solve,
    spread_of_median,
)
from .units import counted, format_s

FLOOR = "prefill_floor_s"
PREFILL_TERMS = ("prefill_overhead_s", "prefill_per_token_s", "prefill_per_token_sq_s")
DECODE_TERMS = ("base_s", "per_sequence_s", "per_cached_token_s")
PASS_TERM = "prefill_per_pass_token_sq_s"
TRANSFER_TERMS = ("transfer_latency_s", "transfer_s_per_byte")
MIN_SHAPES = 4  # of one straight piece
CLEARLY_BETTER = 0.6  # share of the simpler structure's error that is left
GOOD_ENOUGH = 0.02  # rms error at which no further structure is looked for
MAX_BELOW_ONE = 0.2  # a pass that gets faster beside another is a disturbed measurement


@dataclass(frozen=True)
class PassTimes:
    """One shape of a pass: prompt chunks, decode rows, or both, with its repeats."""

    chunks: tuple[Row, ...]
    num_sequences: int
    num_cached_tokens: int
    times_s: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.chunks)

    @property
    def num_attended(self) -> int:
        return sum((cached + new) ** 2 - cached**2 for cached, new in self.chunks)

    @property
    def label(self) -> str:
        """The shape in words: "256 tokens in 4 prompts"."""
        cached = sum(row[0] for row in self.chunks)
        prompts = counted(self.num_tokens, "token") if self.chunks else ""
        prompts += f" in {len(self.chunks)} prompts" if len(self.chunks) > 1 else ""
        prompts += f" after {cached:,}" if cached else ""
        decodes = f"{counted(self.num_sequences, 'sequence')} with {counted(self.num_cached_tokens, 'cached token')}"
        return " beside ".join(part for part in (prompts, decodes if self.num_sequences else "") if part)


@dataclass(frozen=True)
class DecodeFit:
    fit: Fit
    knee_sequences: int | None = None  # the large regime holds from here on


def fit_prefill(passes: Sequence[PassTimes], drift: float = 0.0) -> Fit:
    """Fit `max(floor, overhead + per token) + per token²`; the line only to passes above the floor.

    A term for the square of all tokens of a pass comes in where the others do not describe packed passes.
    """
    samples = sorted((_prefill_sample(p) for p in passes), key=lambda sample: sample.factors)
    num_flat = _floor_end(samples) if len(samples) > MIN_SHAPES else 0
    line = _fit_line(samples[num_flat:], drift)
    if num_flat:
        per_token_sq_s = line.values[PREFILL_TERMS[2]]
        flat = [_without_attention(sample, per_token_sq_s) for sample in samples[:num_flat]]
        return line.joined(fit_terms((FLOOR,), flat, drift))
    shortest = min((sample.median_s for sample in samples), default=0.0)
    reason = "passes get shorter down to the shortest that was timed: no floor shows"
    n = sum(len(sample.times_s) for sample in samples)
    floor = Constant(status="bounded", upper_bound=shortest, n=n, reason=reason)
    return line.joined(Fit({FLOOR: 0.0}, {FLOOR: floor}, line.error, 0))


def fit_decode(passes: Sequence[PassTimes], drift: float = 0.0) -> DecodeFit:
    """Fit `base + per sequence + per cached token`, and once more for large batches where one plane does not do."""
    samples = sorted((_decode_sample(p) for p in passes), key=lambda sample: sample.factors)
    knee = _knee(samples) if samples else None
    small = fit_terms(tuple("decode_" + term for term in DECODE_TERMS), samples[:knee], drift)
    if knee is None:
        return DecodeFit(small)
    large = fit_terms(tuple("decode_large_" + term for term in DECODE_TERMS), samples[knee:], drift)
    return DecodeFit(small.joined(large), int(samples[knee].factors[1]))


def fit_transfer(times_s: dict[int, Sequence[float]], drift: float = 0.0) -> Fit:
    """Fit latency and seconds per byte to transfers of at least four sizes in bytes."""
    samples = [
        Sample(f"{num_bytes:,} bytes", (1.0, float(num_bytes)), tuple(times))
        for num_bytes, times in sorted(times_s.items())
    ]
    return fit_terms(TRANSFER_TERMS, samples, drift, MIN_SHAPES)


def choose_fuse(passes: Sequence[PassTimes], model: CostModel) -> FuseChoice:
    """Return the rule that predicts the fused passes best; `roofline` is assumed when none could be timed."""
    if not passes:
        return FuseChoice(rule="roofline", status="assumed")
    errors: dict[FuseRule, float] = {}
    for rule in get_args(FuseRule):
        ruled = replace(model, fuse=rule)
        off = [
            abs(ruled.fused_s(p.chunks, p.num_sequences, p.num_cached_tokens) / median(p.times_s) - 1) for p in passes
        ]
        errors[rule] = sum(off) / len(off)
    return FuseChoice(rule=min(errors, key=errors.__getitem__), status="measured", relative_errors=errors)


def fit_overhead(times_s: Sequence[float], drift: float = 0.0) -> Constant:
    """Return what a request takes besides its stages; `times_s` are differences, so they may be negative."""
    if not times_s:
        return Constant(status="refused", upper_bound=0.0, n=0, reason="no request was timed")
    middle, spread, n = median(times_s), spread_of_median(times_s), len(times_s)
    if middle > spread:
        return Constant(status="measured", median=middle, spread=spread + drift * middle, n=n)
    reason = f"the difference is {format_s(middle)} ± {format_s(spread)}: inside the noise"
    status = "refused" if middle < 0 else "bounded"
    return Constant(status=status, upper_bound=max(0.0, middle) + spread, n=n, reason=reason)


def fit_ratio(contended_s: Sequence[float], alone_s: Sequence[float], drift: float = 0.0) -> Constant:
    """Return how many times longer a pass takes beside another one; 1 where the noise hides the difference."""
    ratio, n = median(contended_s) / median(alone_s), len(contended_s)
    relative = [spread_of_median(times) / median(times) for times in (contended_s, alone_s)]
    spread = ratio * (sum(relative) + drift)
    if ratio - spread > 1:
        return Constant(status="measured", median=ratio, spread=spread, n=n)
    reason = f"the ratio is {ratio:.2f} ± {spread:.2f}: no slower than alone, as far as the noise shows"
    status = "bounded" if ratio > 1 - MAX_BELOW_ONE else "refused"
    return Constant(status=status, upper_bound=max(1.0, ratio + spread), n=n, reason=reason)


def _fit_line(samples: Sequence[Sample], drift: float) -> Fit:
    crowded = [replace(s, factors=(*s.factors, s.factors[1] ** 2)) for s in samples]
    if len(samples) < MIN_SHAPES + 2 or _rms(relative_errors(samples)) <= max(GOOD_ENOUGH, noise_of(samples)):
        return fit_terms(PREFILL_TERMS, samples, drift)
    is_better = _rms(relative_errors(crowded)) < CLEARLY_BETTER * _rms(relative_errors(samples))
    if not is_better or min(solve(*as_arrays(crowded))) < 0:
        return fit_terms(PREFILL_TERMS, samples, drift)
    return fit_terms((*PREFILL_TERMS, PASS_TERM), crowded, drift)


def _prefill_sample(p: PassTimes) -> Sample:
    return Sample(p.label, (1.0, float(p.num_tokens), float(p.num_attended)), p.times_s)


def _decode_sample(p: PassTimes) -> Sample:
    return Sample(p.label, (1.0, float(p.num_sequences), float(p.num_cached_tokens)), p.times_s)


def _floor_end(samples: Sequence[Sample]) -> int:
    """Return how many of the samples, shortest first, lie on a floor: 0 unless it describes them clearly better."""
    error = _rms(_piecewise_errors(samples, 0))
    num_flat = 0
    if error <= max(GOOD_ENOUGH, noise_of(samples)):
        return 0
    limit = CLEARLY_BETTER * error
    for end in range(2, len(samples) - MIN_SHAPES + 1):
        if samples[end - 1].factors[1] == samples[end].factors[1]:
            continue  # passes of one length belong together
        error = _rms(_piecewise_errors(samples, end))
        if error < limit:
            num_flat, limit = end, error
    return num_flat


def _knee(samples: Sequence[Sample]) -> int | None:
    """Return where a second regime starts, as an index; None unless it describes the samples clearly better."""
    error = _rms(relative_errors(samples))
    if error <= max(GOOD_ENOUGH, noise_of(samples)):
        return None
    knee, limit = None, CLEARLY_BETTER * error
    for start in range(MIN_SHAPES, len(samples) - MIN_SHAPES + 1):
        small, large = samples[:start], samples[start:]
        if small[-1].factors[1] == large[0].factors[1] or not (_varies(small) and _varies(large)):
            continue
        error = _rms(np.concatenate([relative_errors(small), relative_errors(large)]))
        if error < limit:
            knee, limit = start, error
    return knee


def _varies(samples: Sequence[Sample]) -> bool:
    return len({sample.factors[1] for sample in samples}) > 1


def _piecewise_errors(samples: Sequence[Sample], num_flat: int) -> Array:
    if not num_flat:
        return relative_errors(samples)
    factors, medians = as_arrays(samples)
    overhead_s, per_token_s, per_token_sq_s = solve(factors[num_flat:], medians[num_flat:])
    attention_s = per_token_sq_s * factors[:, 2]
    floor_s = 1 / float(np.mean(1 / (medians - attention_s)[:num_flat]))
    dense_s = np.maximum(floor_s, overhead_s + per_token_s * factors[:, 1])
    return (dense_s + attention_s) / medians - 1


def _without_attention(sample: Sample, per_token_sq_s: float) -> Sample:
    attention_s = per_token_sq_s * sample.factors[2]
    return replace(sample, factors=(1.0,), times_s=tuple(time_s - attention_s for time_s in sample.times_s))


def _rms(errors: Array) -> float:
    return float(np.sqrt(np.mean(errors**2)))
