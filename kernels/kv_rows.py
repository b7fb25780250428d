"""Copy key and value rows into and out of a paged cache, the torch reference.

A layer's cache `[num_blocks, 2, block_size, num_kv_heads, head_dim]` is seen as a flat table of rows, one row for the
keys (or values) of one token. `row_ids` says where a token's key lies; its value lies `block_size` rows further on.
Knows no sequence and no block table: whoever calls has turned these into row ids. host_rows.py does the same for caches
in the memory of the CPU, block by block, which is several times as fast.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def key_row_ids(block_table: Sequence[int], positions: range, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return, for each token position, the flat row of its key."""
    table = np.asarray(block_table, dtype=np.int64)
    at = np.arange(positions.start, positions.stop, dtype=np.int64)
    return table[at // block_size] * (2 * block_size) + at % block_size


def flat_rows(cache: Tensor) -> Tensor:
    """View a layer's cache as `[num_blocks * 2 * block_size, num_kv_heads * head_dim]`."""
    num_blocks, two, block_size, num_kv_heads, head_dim = cache.shape
    return cache.view(num_blocks * two * block_size, num_kv_heads * head_dim)


def write_kv(cache: Tensor, row_ids: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write one row a token: `keys` and `values` are `[tokens, num_kv_heads, head_dim]`, `row_ids` `[tokens]`."""
    rows = flat_rows(cache)
    num_tokens = row_ids.shape[0]
    rows.index_copy_(0, row_ids, keys.reshape(num_tokens, -1))
    rows.index_copy_(0, row_ids + cache.shape[2], values.reshape(num_tokens, -1))


def gather_kv(cache: Tensor, row_ids: Tensor, out: Tensor) -> None:
    """Copy rows into `out`, `[2, tokens, num_kv_heads * head_dim]`, keys first. Touches nothing but `out`."""
    rows = flat_rows(cache)
    torch.index_select(rows, 0, row_ids, out=out[0])
    torch.index_select(rows, 0, row_ids + cache.shape[2], out=out[1])


def scatter_kv(cache: Tensor, row_ids: Tensor, rows: Tensor) -> None:
    """Copy what `gather_kv` gave back into a cache, which may have another block size."""
    write_kv(cache, row_ids, rows[0], rows[1])
