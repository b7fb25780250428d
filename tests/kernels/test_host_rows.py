"""Copies of whole blocks against the torch reference, over every way in which tokens can lie in their blocks."""

import numpy as np
import pytest
import torch
from twinpool.kernels.host_rows import HostRows, runs_of
from twinpool.kernels.kv_rows import gather_kv, key_row_ids

NUM_BLOCKS, HEADS, DIM = 9, 2, 3
TABLE = [7, 0, 5, 8, 2]
DTYPES = [torch.float32, torch.bfloat16]


def random_cache(block_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(NUM_BLOCKS, 2, block_size, HEADS, DIM).to(dtype)


def gathered(cache: torch.Tensor, tokens: range) -> torch.Tensor:
    """Return `[2, tokens, HEADS * DIM]` by the reference."""
    out = torch.empty(2, len(tokens), HEADS * DIM, dtype=cache.dtype)
    gather_kv(cache, torch.from_numpy(key_row_ids(TABLE, tokens, cache.shape[2])), out)
    return out


def as_bytes(rows: torch.Tensor) -> np.ndarray:
    return rows.view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4])
def test_every_range_of_tokens_is_gathered_as_the_reference_does(block_size: int, dtype: torch.dtype) -> None:
    cache = random_cache(block_size, dtype)
    for start in range(len(TABLE) * block_size + 1):
        for stop in range(start, len(TABLE) * block_size + 1):
            expected = as_bytes(gathered(cache, range(start, stop)))
            out = np.full_like(expected, 77)
            HostRows(cache).gather(runs_of(TABLE, range(start, stop), block_size, NUM_BLOCKS), out)
            assert np.array_equal(out, expected), (start, stop)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4])
def test_every_range_of_tokens_is_scattered_where_the_reference_reads_it(block_size: int, dtype: torch.dtype) -> None:
    """And no other byte of the cache changes."""
    for start in range(len(TABLE) * block_size + 1):
        for stop in range(start, len(TABLE) * block_size + 1):
            cache, tokens = random_cache(block_size, dtype), range(start, stop)
            before, rows = cache.clone(), gathered(random_cache(block_size, dtype), tokens)
            HostRows(cache).scatter(runs_of(TABLE, tokens, block_size, NUM_BLOCKS), as_bytes(rows))
            assert torch.equal(gathered(cache, tokens), rows), (start, stop)
            for token in tokens:
                place = (TABLE[token // block_size], slice(None), token % block_size)
                before[place] = cache[place]
            assert torch.equal(cache, before), (start, stop)


@pytest.mark.parametrize("table", [[0, NUM_BLOCKS], [0, -1]])
def test_a_block_outside_the_cache_is_a_bug_that_shows(table: list[int]) -> None:
    """numpy would read and write another block in its place."""
    with pytest.raises(AssertionError, match="blocks"):
        runs_of(table, range(5), 4, NUM_BLOCKS)
