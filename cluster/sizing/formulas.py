"""Closed formulas for what a model costs on a device: intensity, decode rate, batch, prefill, chunks, transfer.

They know a model's shape and a device's peaks, no software: every time is a lower bound, every rate an upper one. For
times to expect, pass `device.at(0.6, 0.8)`; for times to plan with, measure (`twinpool calibrate`).

Conventions of the field: a token costs 2 FLOPs a parameter, embeddings included, and a pass reads each weight once.
Attention windows are ignored, so that long contexts are never promised to be cheaper than they are.
"""

from math import ceil

from ..costs import CostModel, DecodeCost
from .devices import Device
from .model_shape import ModelShape

MEMORY_SHARE = 0.9  # of a device's memory that engines take for weights and KV


def ridge_flops_per_byte(device: Device) -> float:
    """Return the intensity at which a device computes exactly as fast as it reads."""
    return device.flops_per_s / device.bytes_per_s


def knee_tokens(shape: ModelShape, device: Device) -> float:
    """Return the size of a pass that multiplies as long as it reads all weights; a smaller one is bound by memory."""
    return ridge_flops_per_byte(device) * shape.weights_bytes / weight_flops(shape, 1)


def weight_flops(shape: ModelShape, num_tokens: int) -> float:
    return 2.0 * shape.num_active_params * num_tokens


def attention_flops(shape: ModelShape, num_tokens: int, num_cached_tokens: int = 0) -> float:
    """Return what causal attention of the next `num_tokens` of one sequence computes, itself and the cache included."""
    compared_twice = (num_cached_tokens + num_tokens) ** 2 - num_cached_tokens**2
    return 2.0 * shape.num_layers * shape.attention_width * compared_twice


def attention_share(shape: ModelShape, num_tokens: int) -> float:
    """Return what attention adds to a prompt's prefill, relative to its multiplications by weights."""
    return attention_flops(shape, num_tokens) / weight_flops(shape, num_tokens)


def intensity_flops_per_byte(shape: ModelShape, num_tokens: int, num_cached_tokens: float = 0.0) -> float:
    """Return FLOPs per byte when `num_tokens` share a read of the weights and read `num_cached_tokens` of KV in all."""
    read_bytes = shape.read_bytes(num_tokens) + num_cached_tokens * shape.kv_bytes_per_token
    return weight_flops(shape, num_tokens) / read_bytes


def decode_step_s(shape: ModelShape, device: Device, num_sequences: int, context_tokens: int) -> float:
    """Return the time of one step of `num_sequences` with `context_tokens` cached each: reading or computing."""
    kv_bytes = num_sequences * context_tokens * shape.kv_bytes_per_token
    read_s = (shape.read_bytes(num_sequences) + kv_bytes) / device.bytes_per_s
    attention = num_sequences * attention_flops(shape, 1, context_tokens)
    return max(read_s, (weight_flops(shape, num_sequences) + attention) / device.flops_per_s)


def max_sequences(shape: ModelShape, device: Device, context_tokens: int, memory_share: float = MEMORY_SHARE) -> int:
    """Return how many sequences of `context_tokens` fit beside the weights; 0 when the weights do not fit either."""
    room_bytes = memory_share * device.memory_bytes - shape.weights_bytes
    return max(0, int(room_bytes // (context_tokens * shape.kv_bytes_per_token)))


def prefill_s(shape: ModelShape, device: Device, num_tokens: int, num_cached_tokens: int = 0) -> float:
    """Return the time of one pass over a prompt's next `num_tokens`, attention included: computing or reading."""
    flops = weight_flops(shape, num_tokens) + attention_flops(shape, num_tokens, num_cached_tokens)
    read_bytes = shape.read_bytes(num_tokens) + num_cached_tokens * shape.kv_bytes_per_token
    return max(flops / device.flops_per_s, read_bytes / device.bytes_per_s)


def num_passes(num_tokens: int, chunk_tokens: int) -> int:
    return ceil(num_tokens / chunk_tokens)


def chunking_overhead_s(num_tokens: int, chunk_tokens: int, pass_overhead_s: float) -> float:
    """Return what a prefill in chunks costs beyond the same prefill in one pass, which has one overhead already."""
    return (num_passes(num_tokens, chunk_tokens) - 1) * pass_overhead_s


def chunked_prefill_s(shape: ModelShape, device: Device, num_tokens: int, chunk_tokens: int) -> float:
    """Return the time of all passes of a prompt in chunks, with nothing beside them."""
    starts = range(0, num_tokens, chunk_tokens)
    return sum(prefill_s(shape, device, min(chunk_tokens, num_tokens - start), start) for start in starts)


def best_chunk_tokens(shape: ModelShape, device: Device, num_sequences: int, context_tokens: int) -> float:
    """Return C* of a device without overhead: the prompt tokens it computes in the time of one decode step."""
    step_s = decode_step_s(shape, device, num_sequences, context_tokens)
    per_token_s = weight_flops(shape, 1) / device.flops_per_s
    return CostModel(prefill_per_token_s=per_token_s, decode=DecodeCost(base_s=step_s)).chunk_size()


def transfer_s(num_tokens: int, kv_bytes_per_token: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the time the KV of `num_tokens` takes over an idle link."""
    return latency_s + num_tokens * kv_bytes_per_token / bytes_per_s
