"""The KV cache of one process: a tensor a layer, and copies between it and the wire.

Gathered rows leave for another worker while the prefill still runs, scattered rows arrive from one. Which block belongs
to whom is block_pool.py's business; nothing here checks it.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cluster.protocol.errors import ProtocolError
from ..kernels.host_rows import HostRows, runs_of
from ..kernels.kv_rows import gather_kv, key_row_ids, scatter_kv
from ..kvtransfer.layout import KVLayout
from .buffer_pool import BufferPool

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POISON = 77.0  # finite: masked rows are read, and what they hold times a weight of 0 must be 0


class KVCache:
    """`layers[i]` is `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, keys before values."""

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, 2, block_size, layout.num_kv_heads, layout.head_dim)
        self.layers = [_zeros(shape, TORCH_DTYPES[layout.dtype], device) for _ in range(layout.num_layers)]
        self._host = [HostRows(layer) for layer in self.layers] if device.type == "cpu" else None
        self._buffers = BufferPool()

    def gather(self, block_table: Sequence[int], layers: range, tokens: range) -> memoryview:
        """Copy rows out: `[len(layers), 2, len(tokens), row_bytes]`, in a buffer that nobody else has.

        Any thread may call this.
        """
        if self._host is None:
            return self._gather_from_device(block_table, layers, tokens)
        runs = runs_of(block_table, tokens, self.block_size, self.num_blocks)
        buffer = self._buffers.take(self.layout.frame_bytes(len(layers), len(tokens)))
        rows = buffer.reshape(len(layers), 2, len(tokens), self.layout.row_bytes)
        for at, layer in enumerate(layers):
            self._host[layer].gather(runs, rows[at])
        return buffer.data

    def scatter(self, block_table: Sequence[int], layers: range, tokens: range, payload: memoryview) -> None:
        """Copy such a buffer in. Raises ProtocolError when its length does not fit."""
        expected = self.layout.frame_bytes(len(layers), len(tokens))
        if payload.nbytes != expected:
            shape = f"{len(layers)} layers x {len(tokens)} tokens"
            raise ProtocolError(f"KV payload of {payload.nbytes} bytes for {shape}, which take {expected}")
        if expected == 0:
            return
        if self._host is None:
            self._scatter_to_device(block_table, layers, tokens, payload)
            return
        runs = runs_of(block_table, tokens, self.block_size, self.num_blocks)
        rows = np.frombuffer(payload, dtype=np.uint8).reshape(len(layers), 2, len(tokens), self.layout.row_bytes)
        for layer, layer_rows in zip(layers, rows, strict=True):
            self._host[layer].scatter(runs, layer_rows)

    @torch.inference_mode()
    def _gather_from_device(self, block_table: Sequence[int], layers: range, tokens: range) -> memoryview:
        row_ids = self._row_ids(block_table, tokens)
        rows = torch.empty(self._wire_shape(layers, tokens), dtype=self.layers[0].dtype, device=row_ids.device)
        for at, layer in enumerate(layers):
            gather_kv(self.layers[layer], row_ids, rows[at])
        return rows.cpu().flatten().view(torch.uint8).numpy().data

    @torch.inference_mode()
    def _scatter_to_device(self, block_table: Sequence[int], layers: range, tokens: range, payload: memoryview) -> None:
        buffer = bytearray(payload) if payload.readonly else payload  # torch takes writable memory only
        rows = torch.frombuffer(buffer, dtype=self.layers[0].dtype).view(self._wire_shape(layers, tokens))
        row_ids = self._row_ids(block_table, tokens)
        for layer, layer_rows in zip(layers, rows.to(row_ids.device), strict=True):
            scatter_kv(self.layers[layer], row_ids, layer_rows)

    @torch.inference_mode()
    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrite whole blocks in every layer."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.layers[0].device)
        for layer in self.layers:
            layer.index_fill_(0, ids, POISON)

    def _wire_shape(self, layers: range, tokens: range) -> tuple[int, int, int, int]:
        return (len(layers), 2, len(tokens), self.layout.num_kv_heads * self.layout.head_dim)

    def _row_ids(self, block_table: Sequence[int], tokens: range) -> Tensor:
        row_ids = torch.from_numpy(key_row_ids(block_table, tokens, self.block_size))
        return row_ids.to(self.layers[0].device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros: masked rows are read, and what they hold times a weight of 0 must be 0."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages, which take memory when first written; torch would write 1 GiB right here.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def num_blocks_that_fit(layout: KVLayout, block_size: int, kv_cache_bytes: int) -> int:
    return kv_cache_bytes // (layout.token_bytes * block_size)
