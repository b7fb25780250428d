"""Row copies against plain indexing."""

import pytest
import torch
from twinpool.kernels.kv_rows import gather_kv, key_row_ids, scatter_kv, write_kv

NUM_KV_HEADS, HEAD_DIM = 2, 3


def filled_cache(num_blocks: int, block_size: int) -> torch.Tensor:
    shape = (num_blocks, 2, block_size, NUM_KV_HEADS, HEAD_DIM)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_gather_reads_the_keys_and_values_that_the_block_table_names(block_size: int) -> None:
    """Row i of the result is block i // block_size, offset i % block_size: keys first, then values."""
    cache = filled_cache(12, block_size)
    block_table = [9, 2, 5, 0, 7, 11, 3, 1, 8]
    tokens = range(2, 9)
    out = torch.empty(2, len(tokens), NUM_KV_HEADS * HEAD_DIM)
    gather_kv(cache, torch.from_numpy(key_row_ids(block_table, tokens, block_size)), out)
    for kind in (0, 1):
        for at, token in enumerate(tokens):
            expected = cache[block_table[token // block_size], kind, token % block_size].flatten()
            assert torch.equal(out[kind, at], expected)


def test_write_changes_the_named_rows_and_no_others() -> None:
    """Every other byte of the cache stays as it was."""
    cache, block_table, tokens = filled_cache(6, 4), [4, 1], range(3, 7)
    before = cache.clone()
    keys = -torch.rand(4, NUM_KV_HEADS, HEAD_DIM) - 1
    values = keys - 10
    write_kv(cache, torch.from_numpy(key_row_ids(block_table, tokens, 4)), keys, values)
    for at, token in enumerate(tokens):
        place = (block_table[token // 4], token % 4)
        assert torch.equal(cache[place[0], 0, place[1]], keys[at])
        assert torch.equal(cache[place[0], 1, place[1]], values[at])
        for kind in (0, 1):
            before[place[0], kind, place[1]] = cache[place[0], kind, place[1]]
    assert torch.equal(cache, before)


def test_scatter_is_the_inverse_of_gather_over_another_block_size() -> None:
    """What is gathered from blocks of 4 and scattered into blocks of 3 reads the same from there."""
    source, target = filled_cache(5, 4), torch.zeros(7, 2, 3, NUM_KV_HEADS, HEAD_DIM)
    tokens = range(11)
    rows, again = torch.empty(2, 11, NUM_KV_HEADS * HEAD_DIM), torch.empty(2, 11, NUM_KV_HEADS * HEAD_DIM)
    gather_kv(source, torch.from_numpy(key_row_ids([3, 0, 4], tokens, 4)), rows)
    there = torch.from_numpy(key_row_ids([6, 1, 5, 2], tokens, 3))
    scatter_kv(target, there, rows)
    gather_kv(target, there, again)
    assert torch.equal(rows, again)
