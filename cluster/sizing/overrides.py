"""Constants given by hand, `KEY=VALUE`: to ask what if, or to play without a measured profile.

The keys are those of a cost profile (see cost_profile.py): `prefill_per_token_s=55.4e-6`, `completion.num_blocks=1000`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any, get_args

from ..costs import CostModel, FuseRule
from ..protocol.errors import ConfigError

Slot = tuple[str, str, Callable[[str], Any]]  # part of the model ("": itself), its field, reader of the value


def override(model: CostModel, assignments: Iterable[str]) -> CostModel:
    """Return the model with the constants replaced. Raises ConfigError naming the key."""
    slots = _slots()
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise ConfigError(f"--set {assignment!r} is not KEY=VALUE", hint="such as prefill_per_token_s=55.4e-6")
        if key not in slots:
            near = get_close_matches(key, slots, n=3)
            raise ConfigError(f"--set: there is no constant {key!r}", hint=f"there are {', '.join(near or slots)}")
        part, field, read = slots[key]
        try:
            change = {field: read(value)}
        except ValueError as error:
            raise ConfigError(f"--set: {key} is {value!r}, must be {error}") from None
        model = replace(model, **({part: replace(getattr(model, part) or model.decode, **change)} if part else change))
    if (model.decode_large is None) != (model.decode_knee_sequences == 0):
        raise ConfigError("--set: decode_knee_sequences and the decode_large constants come together or not at all")
    return model


def _slots() -> dict[str, Slot]:
    plain = ("floor_s", "overhead_s", "per_token_s", "per_token_sq_s", "per_pass_token_sq_s")
    slots: dict[str, Slot] = {f"prefill_{key}": ("", f"prefill_{key}", _number) for key in plain}
    for part in ("decode", "decode_large"):
        for field in ("base_s", "per_sequence_s", "per_cached_token_s"):
            slots[f"{part}_{field}"] = (part, field, _number)
    slots["decode_knee_sequences"] = ("", "decode_knee_sequences", _whole)
    slots["fuse"] = ("", "fuse", _rule)
    slots["transfer_latency_s"] = ("", "transfer_latency_s", _number)
    slots["transfer_s_per_byte"] = ("", "transfer_bytes_per_s", _inverse)
    slots["kv_bytes_per_token"] = ("", "kv_bytes_per_token", _whole)
    slots["request_overhead_s"] = ("", "request_overhead_s", _number)
    for ratio in ("prefill_sending", "prefill_contention", "decode_contention"):
        slots[f"{ratio}_ratio"] = ("", ratio, lambda text: _number(text, 1.0))
    for part in ("prompt", "completion"):
        for field in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            slots[f"{part}.{'block_size_tokens' if field == 'block_size' else field}"] = (part, field, _whole)
    return slots


def _number(text: str, least: float = 0.0) -> float:
    wanted = ValueError(f"a number of at least {least:g}")
    try:
        value = float(text)
    except ValueError:
        raise wanted from None
    if not isfinite(value) or value < least:
        raise wanted
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number of at least 1")
    return int(text)


def _inverse(text: str) -> float:
    value = _number(text)
    return 1 / value if value else inf


def _rule(text: str) -> FuseRule:
    for rule in get_args(FuseRule):
        if text == rule:
            return rule
    raise ValueError(f"one of {', '.join(get_args(FuseRule))}")
