"""All closed formulas about one model on one device, as tables of rows: what `twinpool explain` shows.

`ideal` figures take a device's peaks and are ceilings; `expected` ones take the shares of them that good kernels reach;
`measured` ones come from a cost profile, whose every pass includes the host's time.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any

from ..cost_profile import CostProfile
from ..protocol.errors import ConfigError
from . import formulas
from .devices import Device, load_links
from .model_shape import ModelShape

BATCHES = (1, 8, 32, 128)
CHUNKS_TOKENS = (256, 512, 1024, 2048)
PREFILL_FACTORS = (0.25, 1, 4, 16)  # of the prompt that was asked about
Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    prompt_tokens: int = 2000  # and of history in each sequence that decodes
    batches: tuple[int, ...] = ()  # empty: some, and the largest that fits
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    memory_share: float = formulas.MEMORY_SHARE


def explain(shape: ModelShape, device: Device, question: Question, profile: CostProfile | None = None) -> Row:
    """Return all tables as one JSON object. Raises ConfigError when the profile is another model's."""
    if profile is not None and profile.kv_bytes_per_token != shape.kv_bytes_per_token:
        raise ConfigError(
            f"the cost profile is another model's: its kv_bytes_per_token is {profile.kv_bytes_per_token}, that of "
            f"{shape.name} is {shape.kv_bytes_per_token:g}",
            hint=f"it was measured on {profile.fingerprint.model} in {profile.fingerprint.dtype}; see --kv-bits",
        )
    answer: Row = {
        "model": _model_figures(shape),
        "device": {
            **vars(device),
            "ridge_flops_per_byte": formulas.ridge_flops_per_byte(device),
            "knee_tokens": formulas.knee_tokens(shape, device),
        },
        "question": vars(question),
        "max_sequences": formulas.max_sequences(shape, device, question.prompt_tokens, question.memory_share),
    }
    expected = device.at(question.compute_efficiency, question.bandwidth_efficiency)
    batches = question.batches or _default_batches(answer["max_sequences"])
    lengths = [max(1, round(question.prompt_tokens * factor)) for factor in PREFILL_FACTORS]
    answer["decode"] = [_decode_row(shape, device, expected, n, question.prompt_tokens) for n in batches]
    answer["prefill"] = [_prefill_row(shape, device, expected, n) for n in lengths]
    answer["chunks"] = [
        _chunk_row(shape, expected, chunk, batches[0], question.prompt_tokens) for chunk in CHUNKS_TOKENS
    ]
    answer["transfer"] = _transfer_rows(shape, expected, question.prompt_tokens)
    if profile is not None:
        _add_measured(answer, profile)
    return answer


def _default_batches(max_sequences: int) -> tuple[int, ...]:
    return (*(n for n in BATCHES if n < max_sequences), max_sequences) if max_sequences else BATCHES


def _model_figures(shape: ModelShape) -> Row:
    keys = ("num_active_params", "weights_bytes", "kv_bytes_per_token")
    return {**vars(shape), **{key: getattr(shape, key) for key in keys}}


def _decode_row(shape: ModelShape, device: Device, expected: Device, num_sequences: int, context: int) -> Row:
    row: Row = {
        "num_sequences": num_sequences,
        "intensity_flops_per_byte": formulas.intensity_flops_per_byte(shape, num_sequences, num_sequences * context),
    }
    for kind, at in (("ideal", device), ("expected", expected)):
        step_s = formulas.decode_step_s(shape, at, num_sequences, context)
        row[f"{kind}_step_s"] = step_s
        row[f"{kind}_tokens_per_s"] = num_sequences / step_s
        row[f"{kind}_chunk_tokens"] = formulas.best_chunk_tokens(shape, at, num_sequences, context)
    return row


def _prefill_row(shape: ModelShape, device: Device, expected: Device, num_tokens: int) -> Row:
    return {
        "num_tokens": num_tokens,
        "intensity_flops_per_byte": formulas.intensity_flops_per_byte(shape, num_tokens),
        "attention_share": formulas.attention_share(shape, num_tokens),
        "ideal_s": formulas.prefill_s(shape, device, num_tokens),
        "expected_s": formulas.prefill_s(shape, expected, num_tokens),
    }


def _chunk_row(shape: ModelShape, expected: Device, chunk: int, num_sequences: int, prompt: int) -> Row:
    """Describe passes of one chunk beside a decode step: under `max` it rides along, under `sum` it waits."""
    chunk_s = formulas.prefill_s(shape, expected, min(chunk, prompt))
    step_s = formulas.decode_step_s(shape, expected, num_sequences, prompt)
    return {
        "chunk_tokens": chunk,
        "num_passes": formulas.num_passes(prompt, chunk),
        "expected_chunk_s": chunk_s,
        "expected_gap_max_s": max(chunk_s, step_s),
        "expected_gap_sum_s": chunk_s + step_s,
        "expected_prefill_s": formulas.chunked_prefill_s(shape, expected, prompt, chunk),
    }


def _transfer_rows(shape: ModelShape, expected: Device, prompt: int) -> list[Row]:
    prefill_s = formulas.prefill_s(shape, expected, prompt)
    rows: list[Row] = []
    for link, bytes_per_s in load_links().items():
        transfer_s = formulas.transfer_s(prompt, shape.kv_bytes_per_token, bytes_per_s)
        rows.append(
            {
                "link": link,
                "bytes_per_s": bytes_per_s,
                "transfer_s": transfer_s,
                "share_of_prefill": transfer_s / prefill_s,
            }
        )
    return rows


def _add_measured(answer: Row, profile: CostProfile) -> None:
    """Put what the profile predicts beside the formulas, and its reading of C*."""
    costs, prompt = profile.model(), answer["question"]["prompt_tokens"]
    if not (costs.prefill_per_token_s and costs.decode_s(1, prompt)):
        raise ConfigError("the cost profile says that a prompt's tokens or decode steps take no time: measure it again")
    for row in answer["decode"]:
        batch = (row["num_sequences"], row["num_sequences"] * prompt)
        row["measured_step_s"] = costs.decode_s(*batch)
        row["measured_chunk_tokens"] = costs.chunk_size(*batch)
        row["measured_overhead_share"] = costs.overhead_share(*batch)
        row["measured_reading"] = costs.chunk_or_split(*batch)
    for row in answer["prefill"]:
        row["measured_s"] = costs.prefill_s(row["num_tokens"])
    num_sequences = answer["decode"][0]["num_sequences"]
    for row in answer["chunks"]:
        chunk = row["chunk_tokens"]
        passes = [(start, min(chunk, prompt - start)) for start in range(0, prompt, chunk)]
        row["measured_gap_s"] = costs.fused_s(passes[:1], num_sequences, num_sequences * prompt)
        row["measured_prefill_s"] = sum(costs.pass_s([row]) for row in passes)
    transfer_s = costs.transfer_s(prompt)
    answer["transfer"].append(
        {
            "link": "as measured",
            "bytes_per_s": costs.transfer_bytes_per_s if isfinite(costs.transfer_bytes_per_s) else None,
            "transfer_s": transfer_s,
            "share_of_prefill": transfer_s / costs.prefill_s(prompt),
        }
    )
    answer["costs"] = {
        "fingerprint": profile.fingerprint.model_dump(),
        "bounds": {key: c.value for key, c in profile.constants.items() if c.status != "measured"},
    }
