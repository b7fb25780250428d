"""A whole cost profile from a few constants, for tests of what reads profiles."""

from typing import Literal

from twinpool.cluster.cost_profile import (
    Constant,
    Constants,
    CostProfile,
    Fingerprint,
    FuseChoice,
    WorkerCapacity,
)
from twinpool.cluster.costs import FuseRule

CAPACITY = WorkerCapacity(num_blocks=4096, block_size_tokens=32, max_num_seqs=64, max_num_batched_tokens=2048)


def measured(median: float, spread: float = 0.0) -> Constant:
    return Constant(status="measured", median=median, spread=spread, n=7)


def refused(upper_bound: float, status: Literal["bounded", "refused"] = "refused") -> Constant:
    return Constant(status=status, upper_bound=upper_bound, n=7, reason="the noise is larger than the effect")


def cost_profile(
    *,
    model: str = "smollm2",
    prompt: WorkerCapacity = CAPACITY,
    completion: WorkerCapacity = CAPACITY,
    fuse: FuseRule = "max",
    kv_bytes_per_token: int = 23_040,
    **constants: Constant | float,
) -> CostProfile:
    """Return a profile of a small GPU; `constants` replaces some by their key, a number stands for a measured one."""
    defaults: dict[str, Constant | float] = {
        "prefill_floor_s": 0.0,
        "prefill_overhead_s": 0.001,
        "prefill_per_token_s": 1e-5,
        "prefill_per_token_sq_s": 0.0,
        "decode_base_s": 0.010,
        "decode_per_sequence_s": 5e-5,
        "decode_per_cached_token_s": 1e-7,
        "transfer_latency_s": 0.0005,
        "transfer_s_per_byte": 1e-10,
        "request_overhead_s": 0.001,
        "prefill_sending_ratio": 1.0,
        "prefill_contention_ratio": 1.0,
        "decode_contention_ratio": 1.0,
    }
    values = {key: measured(v) if isinstance(v, float) else v for key, v in {**defaults, **constants}.items()}
    return CostProfile(
        measured_at="2025-01-01T00:00:00Z",
        fingerprint=Fingerprint(
            model=model, weights="0" * 16, dtype="bfloat16", engine="model", host="test", num_threads=1
        ),
        constants=Constants.model_validate(values),
        fuse=FuseChoice(rule=fuse, status="assumed"),
        kv_bytes_per_token=kv_bytes_per_token,
        prompt=prompt,
        completion=completion,
    )
