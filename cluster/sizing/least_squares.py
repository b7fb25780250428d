"""Linear least squares on relative errors, and whether the noise can carry what comes out. Pure.

A sample is one shape timed several times; its median counts, and short passes count as much as long ones. The spread
of a term is half the interval that holds 90 % of the fits to resampled repeats, or what the misfit of the samples
allows where that is more. A term that is negative, or that moves the samples less than they scatter, gets no number
but an upper bound; when the terms do not describe the samples at all, none gets a number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..cost_profile import Constant
from .units import format_s

NUM_RESAMPLES = 300
ENOUGH_REPEATS = 5  # to tell from a shape's own repeats how they scatter
SEED = 20_240_229
HALF_90 = 1.645  # standard deviations
RESOLUTION_S = 1e-9  # of the clock: repeats that agree exactly still hide this much
MAX_MEAN_ERROR = 0.25  # public pass times of real GPUs fit within 19 %; with one corrupt cell 48 % and more are left
MAX_ERROR = 0.6  # of a single shape

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One shape: what multiplies each term, and how long its repeats took."""

    label: str  # for messages: "512 tokens"
    factors: tuple[float, ...]
    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.times_s)


@dataclass(frozen=True)
class Fit:
    """`values` describe the samples best (0 for a term without a number); `constants` are what may be published."""

    values: Mapping[str, float]
    constants: Mapping[str, Constant]
    error: float  # mean of |predicted / measured - 1|
    num_shapes: int

    def joined(self, other: "Fit") -> "Fit":
        """Return both fits as one; they describe different samples."""
        num_shapes = self.num_shapes + other.num_shapes
        weighted = self.error * self.num_shapes + other.error * other.num_shapes
        return Fit(
            {**self.values, **other.values},
            {**self.constants, **other.constants},
            weighted / max(1, num_shapes),
            num_shapes,
        )


class _Samples:
    """The samples as arrays: medians [m], factors [m, k], resampled medians [m, NUM_RESAMPLES]."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        random = np.random.default_rng(SEED)
        self.samples = samples
        self.num_times = sum(len(sample.times_s) for sample in samples)
        self.factors, self.medians = as_arrays(samples)
        self.resampled = np.array(
            [_resample(times_s, len(sample.times_s), random) for sample, times_s in _pools(samples)]
        )
        self.noise = _half_width(self.resampled) / self.medians  # of each median, relative

    def without(self, index: int) -> list[Sample]:
        return [sample for i, sample in enumerate(self.samples) if i != index]


def fit_terms(names: Sequence[str], samples: Sequence[Sample], drift: float = 0.0, min_shapes: int = 0) -> Fit:
    """Fit `time = Σ factor · term`; the first term's factor is 1 everywhere.

    `drift` is how much the machine itself moved while it was timed, relative; each spread is widened by it.
    """
    needed = max(min_shapes, len(names) + 1)
    if len(samples) < needed:
        words = ", ".join(sample.label for sample in samples) or "none"
        return _refuse_all(names, samples, f"needs {needed} different shapes, was given {words}")
    data = _Samples(samples)
    kept, dropped = list(range(len(names))), dict[int, Constant]()
    while True:
        estimates, spreads, misfit = _estimate(data, kept)
        weak = _weakest(data, kept, estimates, spreads, misfit)
        if weak is None:
            break
        scatter = _scatter(data, kept[weak], misfit)
        dropped[kept[weak]] = _bound(data, kept[weak], float(estimates[weak]), float(spreads[weak]), scatter)
        del kept[weak]
    if not kept:
        return _all_noise(names, data)
    errors = data.factors[:, kept] @ estimates / data.medians - 1
    if np.abs(errors).mean() > MAX_MEAN_ERROR or np.abs(errors).max() > MAX_ERROR:
        return _refuse_misfit(names, data, errors, [names[i] for i in sorted(dropped)])
    values = dict.fromkeys(names, 0.0) | {names[i]: float(x) for i, x in zip(kept, estimates, strict=True)}
    constants: dict[str, Constant] = {}
    for index, name in enumerate(names):
        if index in dropped:
            constants[name] = dropped[index]
        else:
            spread = float(spreads[kept.index(index)]) + drift * values[name]
            constants[name] = Constant(status="measured", median=values[name], spread=spread, n=data.num_times)
    return Fit(values, constants, float(np.abs(errors).mean()), len(samples))


def relative_errors(samples: Sequence[Sample]) -> Array:
    """Return predicted / measured - 1 of the plain fit, terms of any sign."""
    factors, medians = as_arrays(samples)
    return factors @ solve(factors, medians) / medians - 1


def solve(factors: Array, medians: Array) -> Array:
    """Return the terms that make the sum of squared relative errors smallest."""
    found = np.linalg.lstsq(factors / medians[:, None], np.ones(len(medians)), rcond=None)[0]
    return np.asarray(found, dtype=np.float64)


def as_arrays(samples: Sequence[Sample]) -> tuple[Array, Array]:
    """Return the factors [m, k] and the medians [m]."""
    factors = np.array([sample.factors for sample in samples], dtype=np.float64)
    return factors, np.array([sample.median_s for sample in samples])


def noise_of(samples: Sequence[Sample]) -> float:
    """Return how far the medians scatter, relative: that of the middle sample."""
    return median(spread_of_median(sample.times_s) / sample.median_s for sample in samples)


def spread_of_median(times_s: Sequence[float]) -> float:
    """Return half the interval that holds 90 % of the medians of resampled repeats, the clock's resolution at least."""
    return max(RESOLUTION_S, float(_half_width(_resample(times_s, len(times_s), np.random.default_rng(SEED)))))


def _half_width(values: Array) -> Array:
    low, high = np.quantile(values, (0.05, 0.95), axis=-1)
    return (high - low) / 2


def _pools(samples: Sequence[Sample]) -> list[tuple[Sample, Sequence[float]]]:
    """Return what to draw each sample's repeats from: its own, or where these are few, what all together scatter."""
    scatter = [time_s / sample.median_s for sample in samples for time_s in sample.times_s]
    return [
        (s, s.times_s if len(s.times_s) >= ENOUGH_REPEATS else [s.median_s * ratio for ratio in scatter])
        for s in samples
    ]


def _resample(times_s: Sequence[float], num_repeats: int, random: np.random.Generator) -> Array:
    return np.median(random.choice(np.array(times_s), (NUM_RESAMPLES, num_repeats)), axis=1)


def _estimate(data: _Samples, kept: list[int]) -> tuple[Array, Array, float]:
    """Return the terms, their spreads (of resampled repeats, or of the misfit where that is more), and the misfit."""
    if not kept:
        return np.zeros(0), np.zeros(0), 0.0
    weighted = data.factors[:, kept] / data.medians[:, None]
    inverse = np.linalg.pinv(weighted)
    estimates = inverse @ np.ones(len(data.medians))
    resampled = inverse @ (data.resampled / data.medians[:, None])
    misfit = float(np.sqrt(np.sum((weighted @ estimates - 1) ** 2) / max(1, len(data.medians) - len(kept))))
    spreads = np.maximum(_half_width(resampled), HALF_90 * misfit * np.sqrt(np.sum(inverse**2, axis=1)))
    return estimates, spreads, misfit


def _weakest(data: _Samples, kept: list[int], estimates: Array, spreads: Array, misfit: float) -> int | None:
    """Return the position of the term that the noise can carry least, None when it can carry all."""
    if not kept:
        return None
    factors = data.factors[:, kept]
    fixed = [i for i, column in enumerate(kept) if column and np.ptp(data.factors[:, column]) == 0]
    if fixed:
        return fixed[0]
    if np.linalg.matrix_rank(factors / data.medians[:, None]) < len(kept):
        return len(kept) - 1
    carried = [estimates[i] - max(spreads[i], _scatter(data, column, misfit)) for i, column in enumerate(kept)]
    if all(margin > 0 for margin in carried):
        return None
    return int(np.argmin(estimates / np.maximum(spreads, 1e-300)))


def _scatter(data: _Samples, column: int, misfit: float) -> float:
    """Return the term that would move the samples just as much as they scatter where the term weighs most."""
    factors = data.factors[:, column]
    range_ = float(np.ptp(factors)) or 1.0
    weighs_most = int(np.argmax(factors)) if column else int(np.argmin(data.medians))
    return max(RESOLUTION_S, float(max(np.median(data.noise), misfit) * data.medians[weighs_most])) / range_


def _bound(data: _Samples, column: int, estimate: float, spread: float, scatter: float) -> Constant:
    factors = data.factors[:, column]
    ceiling = min(sample.median_s / f for sample, f in zip(data.samples, factors, strict=True) if f > 0)
    if column and np.ptp(factors) == 0:
        reason = f"it was {factors[0]:g} in every timed shape, so it cannot be told from the first term"
        return Constant(status="refused", upper_bound=ceiling, n=data.num_times, reason=reason)
    bound = min(ceiling, max(0.0, estimate) + max(scatter, spread if estimate > 0 else scatter))
    if estimate < 0:
        reason = f"the fit gives {format_s(estimate)}, which is impossible; the noise hides up to {format_s(scatter)}"
        return Constant(status="refused", upper_bound=bound, n=data.num_times, reason=reason)
    reason = f"the fit gives {format_s(estimate)} ± {format_s(max(scatter, spread))}: inside the noise"
    return Constant(status="bounded", upper_bound=bound, n=data.num_times, reason=reason)


def _all_noise(names: Sequence[str], data: _Samples) -> Fit:
    """Not one term shows. Each is at most the whole of the pass in which it weighs most, as long as that may be."""
    longest_s = np.quantile(data.resampled, 0.95, axis=1)
    constants: dict[str, Constant] = {}
    for column, name in enumerate(names):
        pairs = zip(longest_s.tolist(), data.factors[:, column].tolist(), strict=True)
        bound = min((time_s / factor for time_s, factor in pairs if factor > 0), default=float(longest_s.max()))
        reason = (
            f"not one term stands out from the noise, which is ±{np.median(data.noise):.0%} of the median of a timed "
            f"pass; it can be {format_s(bound)} at most, the whole of such a pass"
        )
        constants[name] = Constant(status="refused", upper_bound=bound, n=data.num_times, reason=reason)
    return Fit(dict.fromkeys(names, 0.0), constants, 1.0, len(data.samples))


def _refuse_misfit(names: Sequence[str], data: _Samples, errors: Array, hidden: Sequence[str]) -> Fit:
    """Refuse every term; its bound is the largest that any fit without one of the shapes gives."""
    leave_one_out = np.array([solve(*as_arrays(data.without(i))) for i in range(len(data.medians))])
    mean_errors = [float(np.abs(relative_errors(data.without(i))).mean()) for i in range(len(data.medians))]
    worst = int(np.argmin(mean_errors))  # the shape without which the others agree best
    sample, mean_error = data.samples[worst], float(np.abs(errors).mean())
    without = f" without {' and '.join(hidden)}, which the noise hides" if hidden else ""
    reason = (
        f"the timed passes do not follow the model{without}: off by {mean_error:.0%} on average, by "
        f"{errors[worst]:+.0%} at {sample.label} ({format_s(sample.median_s)}); without that one by "
        f"{mean_errors[worst]:.0%}"
    )
    rms = float(np.sqrt(np.mean(errors**2)))
    constants: dict[str, Constant] = {}
    for column, name in enumerate(names):
        factors = data.factors[:, column]
        widest = int(np.argmax(factors)) if column else int(np.argmin(data.medians))
        residue = rms * float(data.medians[widest]) / (float(np.ptp(factors)) or 1.0)
        bound = max(0.0, float(leave_one_out[:, column].max())) + residue
        constants[name] = Constant(status="refused", upper_bound=bound, n=data.num_times, reason=reason)
    return Fit(
        dict(zip(names, np.maximum(0.0, leave_one_out[worst]).tolist(), strict=True)),
        constants,
        mean_error,
        len(data.samples),
    )


def _refuse_all(names: Sequence[str], samples: Sequence[Sample], reason: str) -> Fit:
    """Too few shapes: each term is at most the whole of the pass in which it weighs least."""
    constants: dict[str, Constant] = {}
    for column, name in enumerate(names):
        ratios = [sample.median_s / sample.factors[column] for sample in samples if sample.factors[column] > 0]
        num_times = sum(len(sample.times_s) for sample in samples)
        constants[name] = Constant(status="refused", upper_bound=min(ratios, default=0.0), n=num_times, reason=reason)
    return Fit(dict.fromkeys(names, 0.0), constants, 0.0, len(samples))
