"""The calibrator's published result: every constant with its spread and status, and of what it was measured.

A JSON file; its keys carry the units. A constant that the data could not carry has no median, only an upper bound, and
everything that plans uses the bound: refused is not zero. Read by the commands that plan, simulate, explain and
validate, and by a router whose spec names one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .config import ClusterSpec
from .costs import Capacity, CostModel, DecodeCost, FuseRule
from .protocol.errors import ConfigError

FORMAT = "twinpool-costs/1"


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Constant(Part):
    """One constant. `spread` is half the width of the interval that holds 90 % of resampled fits."""

    status: Literal["measured", "bounded", "refused"]
    median: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    spread: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    upper_bound: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # of bounded and refused
    n: int = Field(ge=0)  # timed passes behind it
    reason: str = ""  # why bounded or refused, or measured without a timed pass

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.status == "measured" and self.median is None:
            raise ValueError("a measured constant needs its median")
        if self.status != "measured" and self.upper_bound is None:
            raise ValueError(f"a {self.status} constant needs its upper_bound")
        return self

    @property
    def value(self) -> float:
        """What to plan with: the median, or the bound of a constant that was not measured."""
        value = self.median if self.status == "measured" else self.upper_bound
        assert value is not None
        return value

    def draw(self, random: Random) -> float:
        """Return a value that the measurement allows."""
        if self.status == "measured":
            return max(0.0, random.uniform(self.value - self.spread, self.value + self.spread))
        return random.uniform(0.0, self.value)


class Fingerprint(Part):
    """What the constants belong to. Of anything else they say nothing."""

    model: str
    weights: str
    dtype: str
    engine: str
    host: str
    num_threads: int = Field(ge=1)


class WorkerCapacity(Part):
    num_blocks: int = Field(ge=1)
    block_size_tokens: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)

    def capacity(self) -> Capacity:
        return Capacity(self.num_blocks, self.block_size_tokens, self.max_num_seqs, self.max_num_batched_tokens)


class FuseChoice(Part):
    """Which rule predicts a fused pass best; `relative_errors` of each, mean of |predicted/measured - 1|."""

    rule: FuseRule
    status: Literal["measured", "assumed"]
    relative_errors: dict[FuseRule, float] = Field(default_factory=dict)


class Constants(Part):
    prefill_floor_s: Constant
    prefill_overhead_s: Constant
    prefill_per_token_s: Constant
    prefill_per_token_sq_s: Constant
    prefill_per_pass_token_sq_s: Constant | None = None  # only where long passes are clearly slower than their sum
    decode_base_s: Constant
    decode_per_sequence_s: Constant
    decode_per_cached_token_s: Constant
    decode_large_base_s: Constant | None = None
    decode_large_per_sequence_s: Constant | None = None
    decode_large_per_cached_token_s: Constant | None = None
    transfer_latency_s: Constant
    transfer_s_per_byte: Constant
    request_overhead_s: Constant
    prefill_sending_ratio: Constant  # how many times longer a pass takes while its KV is sent away
    prefill_contention_ratio: Constant  # how many times slower while a decode step runs on the same host
    decode_contention_ratio: Constant

    def items(self) -> list[tuple[str, Constant]]:
        """Return every constant that is there with its key, in the file's order."""
        pairs = [(key, getattr(self, key)) for key in type(self).model_fields]
        return [(key, constant) for key, constant in pairs if constant is not None]


class CostProfile(Part):
    format: Literal["twinpool-costs/1"] = FORMAT
    measured_at: str  # ISO 8601, UTC
    fingerprint: Fingerprint
    constants: Constants
    decode_knee_sequences: int | None = Field(default=None, ge=1)  # the large-batch constants hold from here on
    fuse: FuseChoice
    kv_bytes_per_token: int = Field(ge=1)
    prompt: WorkerCapacity
    completion: WorkerCapacity
    notes: tuple[str, ...] = ()
    started_with: dict[str, Any] | None = None  # of the cluster's spec: the model, and what is not the default

    @field_validator("started_with")
    @classmethod
    def _is_spec(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and "model" not in ClusterSpec.model_validate(value).model_fields_set:
            raise ValueError("it needs the model that the cluster was started with")
        return value

    @model_validator(mode="after")
    def _regimes(self) -> Self:
        large = (
            self.constants.decode_large_base_s,
            self.constants.decode_large_per_sequence_s,
            self.constants.decode_large_per_cached_token_s,
        )
        if any(constant is None for constant in large) != (self.decode_knee_sequences is None) or (
            self.decode_knee_sequences is None and any(constant is not None for constant in large)
        ):
            raise ValueError("decode_knee_sequences and the three decode_large constants come together or not at all")
        return self

    def model(self) -> CostModel:
        """Return the model to plan with: medians, and the upper bounds of what was not measured."""
        return self._model({key: constant.value for key, constant in self.constants.items()})

    def expected(self) -> CostModel:
        """Return the model to predict with: what the noise hides is taken at the middle of what it may be."""
        least = {key: 1.0 if key.endswith("_ratio") else 0.0 for key, _ in self.constants.items()}
        return self._model(
            {
                key: constant.value if constant.status == "measured" else (least[key] + constant.value) / 2
                for key, constant in self.constants.items()
            }
        )

    def draw(self, random: Random) -> CostModel:
        """Return a model that the measurements allow as well, each constant drawn within its spread."""
        return self._model({key: constant.draw(random) for key, constant in self.constants.items()})

    def _model(self, values: dict[str, float]) -> CostModel:
        large = None
        if self.decode_knee_sequences is not None:
            large = _decode(values, "decode_large_")
        s_per_byte = values["transfer_s_per_byte"]
        return CostModel(
            prefill_floor_s=values["prefill_floor_s"],
            prefill_overhead_s=values["prefill_overhead_s"],
            prefill_per_token_s=values["prefill_per_token_s"],
            prefill_per_token_sq_s=values["prefill_per_token_sq_s"],
            prefill_per_pass_token_sq_s=values.get("prefill_per_pass_token_sq_s", 0.0),
            decode=_decode(values, "decode_"),
            decode_large=large,
            decode_knee_sequences=self.decode_knee_sequences or 0,
            fuse=self.fuse.rule,
            transfer_latency_s=values["transfer_latency_s"],
            transfer_bytes_per_s=1 / s_per_byte if s_per_byte else float("inf"),
            kv_bytes_per_token=self.kv_bytes_per_token,
            request_overhead_s=values["request_overhead_s"],
            prefill_sending=max(1.0, values["prefill_sending_ratio"]),
            prefill_contention=max(1.0, values["prefill_contention_ratio"]),
            decode_contention=max(1.0, values["decode_contention_ratio"]),
            prompt=self.prompt.capacity(),
            completion=self.completion.capacity(),
        )

    def save(self, path: Path) -> None:
        try:
            path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the cost profile {path}: {error.strerror}") from error


def check_fingerprint(profile: CostProfile, other: Fingerprint | Mapping[str, object]) -> None:
    """Check that the constants belong to `other`, which may name only some keys.

    Raises ConfigError naming each key that differs, with both values.
    """
    mine = profile.fingerprint.model_dump()
    theirs = other.model_dump() if isinstance(other, Fingerprint) else other
    wrong = [f"{key}: measured with {mine[key]}, asked for {theirs[key]}" for key in theirs if mine[key] != theirs[key]]
    if wrong:
        raise ConfigError(
            "the cost profile was measured on something else:\n  " + "\n  ".join(wrong),
            hint="`twinpool calibrate` measures the cluster that runs",
        )


def load_profile(path: Path) -> CostProfile:
    """Read a profile. Raises ConfigError naming the file and the key."""
    try:
        return CostProfile.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise ConfigError(
            f"cannot read the cost profile {path}: {error.strerror}", hint="`twinpool calibrate -o FILE` makes one"
        ) from error
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in e['loc']) or path}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{path} is not a cost profile:\n  " + "\n  ".join(lines)) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def _decode(values: dict[str, float], prefix: str) -> DecodeCost:
    return DecodeCost(
        values[prefix + "base_s"], values[prefix + "per_sequence_s"], values[prefix + "per_cached_token_s"]
    )
