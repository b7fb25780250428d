"""Copies between a paged cache in the CPU's memory and packed rows, whole blocks at once; kv_rows.py is the reference.

A transfer moves every byte of a prompt's KV cache through here twice. torch's indexed copies go row by row and reach a
third of the memory's speed when they write; blocks are long enough for plain copies, and numpy makes them without a
thread or an allocation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Run:
    """Tokens that lie alike in their blocks: a part of one block, or any number of whole ones."""

    blocks: NDArray[np.int64]
    offsets: slice  # in each of the blocks
    rows: slice  # in the packed rows


class HostRows:
    """One layer's cache, `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, as bytes in this process's memory."""

    def __init__(self, cache: Tensor) -> None:
        num_blocks, two, block_size, num_kv_heads, head_dim = cache.shape
        row_bytes = num_kv_heads * head_dim * cache.element_size()
        self._rows: Bytes = cache.view(torch.uint8).numpy().reshape(num_blocks, two, block_size, row_bytes)
        self._item = np.dtype((np.void, block_size * row_bytes))  # half a block, which numpy copies whole
        self._half_blocks: NDArray[Any] = self._rows.reshape(-1).view(self._item)

    def gather(self, runs: Sequence[Run], out: Bytes) -> None:
        """Copy rows into `out`, `[2, tokens, row_bytes]`, keys first. Touches nothing but `out`."""
        for run in runs:
            for kv in (0, 1):
                rows = out[kv, run.rows]
                if self._is_whole(run):
                    # "clip" never clips here, see runs_of; any other mode makes numpy copy twice.
                    self._half_blocks.take(2 * run.blocks + kv, out=rows.reshape(-1).view(self._item), mode="clip")
                else:
                    rows[:] = self._rows[run.blocks[0], kv, run.offsets]

    def scatter(self, runs: Sequence[Run], rows: Bytes) -> None:
        """Copy what `gather` gave back into a cache, which may have another block size."""
        for run in runs:
            for kv in (0, 1):
                if self._is_whole(run):
                    self._half_blocks[2 * run.blocks + kv] = rows[kv, run.rows].reshape(-1).view(self._item)
                else:
                    self._rows[run.blocks[0], kv, run.offsets] = rows[kv, run.rows]

    def _is_whole(self, run: Run) -> bool:
        return run.offsets.stop - run.offsets.start == self._rows.shape[2]


def runs_of(block_table: Sequence[int], tokens: range, block_size: int, num_blocks: int) -> list[Run]:
    """Cut `tokens` at their blocks' limits: whole blocks together, a part of one at either end."""
    first = tokens.start // block_size
    blocks = np.asarray(block_table[first : -(-tokens.stop // block_size)], dtype=np.int64)
    assert len(blocks) == 0 or blocks.view(np.uint64).max() < num_blocks, f"blocks {block_table}"  # negative: huge
    return [
        Run(
            blocks[start // block_size - first : -(-stop // block_size) - first],
            slice(start % block_size, start % block_size + min(stop - start, block_size)),
            slice(start - tokens.start, stop - tokens.start),
        )
        for start, stop in _cuts(tokens, block_size)
    ]


def _cuts(tokens: range, block_size: int) -> Iterator[tuple[int, int]]:
    head = min(tokens.stop, -(-tokens.start // block_size) * block_size)
    tail = max(head, tokens.stop // block_size * block_size)
    for start, stop in ((tokens.start, head), (head, tail), (tail, tokens.stop)):
        if start < stop:
            yield start, stop
