"""Everything that a calibration timed, and the profile that follows from it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cost_profile import Constant, Constants, CostProfile, Fingerprint, WorkerCapacity
from ..costs import CostModel, DecodeCost
from .fit import (
    DECODE_TERMS,
    FLOOR,
    PASS_TERM,
    PREFILL_TERMS,
    DecodeFit,
    PassTimes,
    choose_fuse,
    fit_decode,
    fit_overhead,
    fit_prefill,
    fit_ratio,
    fit_transfer,
)
from .least_squares import Fit
from .probing import ProbedWorker

NO_CONTENTION = Constant(status="measured", median=1.0, n=0, reason="the timed workers share no host")


@dataclass(frozen=True)
class Serving:
    """What passes and steps take while a cluster serves: one prompt's prefill, and the gaps between streamed tokens."""

    probed_s: list[float]  # the bare pass
    served_s: list[float]  # as a request: its KV is sent meanwhile
    served_beside_s: list[float]  # as a request, while others decode
    gaps_s: list[float]  # while nothing is prefilled
    gaps_beside_s: list[float]  # while those requests are


@dataclass(frozen=True)
class Measurements:
    prompt: ProbedWorker
    completion: ProbedWorker
    prefill: Sequence[PassTimes]
    decode: Sequence[PassTimes]
    fused: Sequence[PassTimes]
    transfers_s: Mapping[int, Sequence[float]]  # by tokens
    overheads_s: Sequence[float]  # what requests took besides their stages
    serving: Serving
    drift: float  # how far the machine moved meanwhile, relative
    notes: Sequence[str]


def build_profile(measured: Measurements, fingerprint: Fingerprint, measured_at: str) -> CostProfile:
    """Return the constants that describe the measurements."""
    drift, num_bytes = measured.drift, measured.prompt.kv_bytes_per_token
    prefill, decode = fit_prefill(measured.prefill, drift), fit_decode(measured.decode, drift)
    link = fit_transfer({n * num_bytes: times_s for n, times_s in measured.transfers_s.items()}, drift)
    constants: dict[str, Constant] = {**prefill.constants, **decode.fit.constants, **link.constants}
    constants["request_overhead_s"] = fit_overhead(measured.overheads_s, drift)
    constants |= _serving_ratios(measured, drift)
    return CostProfile(
        measured_at=measured_at,
        fingerprint=fingerprint,
        constants=Constants.model_validate(constants),
        decode_knee_sequences=decode.knee_sequences,
        fuse=choose_fuse(measured.fused, _bare_model(prefill, decode)),
        kv_bytes_per_token=num_bytes,
        prompt=_capacity(measured.prompt),
        completion=_capacity(measured.completion),
        notes=(f"timed on {measured.prompt.name} and {measured.completion.name}", *measured.notes),
    )


def _serving_ratios(measured: Measurements, drift: float) -> dict[str, Constant]:
    times, share_host = measured.serving, measured.prompt.host == measured.completion.host
    prefill = fit_ratio(times.served_beside_s, times.served_s, drift)
    decode = fit_ratio(times.gaps_beside_s, times.gaps_s, drift)
    return {
        "prefill_sending_ratio": fit_ratio(times.served_s, times.probed_s, drift),
        "prefill_contention_ratio": prefill if share_host else NO_CONTENTION,
        "decode_contention_ratio": decode if share_host else NO_CONTENTION,
    }


def _bare_model(prefill: Fit, decode: DecodeFit) -> CostModel:
    """Return the model that describes the timed passes best, for the choice of the fused rule."""

    def regime(prefix: str) -> DecodeCost:
        return DecodeCost(*(decode.fit.values[prefix + term] for term in DECODE_TERMS))

    floor_s, overhead_s, per_token_s, per_token_sq_s = (prefill.values[key] for key in (FLOOR, *PREFILL_TERMS))
    return CostModel(
        prefill_floor_s=floor_s,
        prefill_overhead_s=overhead_s,
        prefill_per_token_s=per_token_s,
        prefill_per_token_sq_s=per_token_sq_s,
        prefill_per_pass_token_sq_s=prefill.values.get(PASS_TERM, 0.0),
        decode=regime("decode_"),
        decode_large=None if decode.knee_sequences is None else regime("decode_large_"),
        decode_knee_sequences=decode.knee_sequences or 0,
    )


def _capacity(worker: ProbedWorker) -> WorkerCapacity:
    return WorkerCapacity(
        num_blocks=worker.num_blocks,
        block_size_tokens=worker.block_size,
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
    )
