"""Paged attention of mixed steps against attention written out query by query in float64."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from twinpool.kernels.kv_rows import key_row_ids, write_kv
from twinpool.kernels.paged_attention import AttentionOptions, Chunk, DecodeGroup, PagedBatch, paged_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8
OPTIONS = {
    "plain": AttentionOptions(0.3),
    "window": AttentionOptions(0.3, sliding_window=5),
    "wide window": AttentionOptions(0.3, sliding_window=200),
    "softcap": AttentionOptions(0.3, softcap=2.0),
    "sinks": AttentionOptions(0.3, sinks=torch.linspace(-1, 2, NUM_HEADS)),
    "all": AttentionOptions(0.3, sliding_window=5, softcap=2.0, sinks=torch.linspace(-1, 2, NUM_HEADS)),
}


@dataclass(frozen=True)
class Context:
    """One sequence: all its keys and values, and how many of its last tokens are new in this step."""

    keys: torch.Tensor  # [context, num_kv_heads, head_dim]
    values: torch.Tensor
    query: torch.Tensor  # [new tokens, num_heads, head_dim]
    block_table: list[int]

    @property
    def length(self) -> int:
        return self.keys.shape[0]

    @property
    def num_new(self) -> int:
        return self.query.shape[0]


def reference(context: Context, options: AttentionOptions) -> torch.Tensor:
    """Attend query by query and head by head, as the definition says."""
    out = torch.zeros(context.num_new, NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    for i in range(context.num_new):
        position = context.length - context.num_new + i
        low = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            keys = context.keys[low : position + 1, kv_head].double()
            scores = keys @ context.query[i, head].double() * options.scaling
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            weights = scores.exp()
            sink = 0.0 if options.sinks is None else math.exp(float(options.sinks[head]))
            out[i, head] = weights @ context.values[low : position + 1, kv_head].double() / (weights.sum() + sink)
    return out


def make_contexts(shapes: list[tuple[int, int]], block_size: int, dtype: torch.dtype) -> list[Context]:
    """Make contexts of (length, new tokens) whose blocks are scattered over the cache."""
    generator = torch.Generator().manual_seed(len(shapes) * 100 + block_size)
    free = torch.randperm(sum(-(-length // block_size) for length, _ in shapes), generator=generator).tolist()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    contexts: list[Context] = []
    for length, num_new in shapes:
        table = [free.pop() for _ in range(-(-length // block_size))]
        kv_shape = (length, NUM_KV_HEADS, HEAD_DIM)
        contexts.append(Context(random(*kv_shape), random(*kv_shape), random(num_new, NUM_HEADS, HEAD_DIM), table))
    return contexts


def fill_cache(contexts: list[Context], block_size: int) -> torch.Tensor:
    num_blocks = sum(len(context.block_table) for context in contexts)
    shape = (num_blocks, 2, block_size, NUM_KV_HEADS, HEAD_DIM)
    cache = torch.full(shape, 1e4, dtype=contexts[0].keys.dtype)  # what lies beyond a context must not be seen
    for context in contexts:
        rows = torch.from_numpy(key_row_ids(context.block_table, range(context.length), block_size))
        write_kv(cache, rows, context.keys, context.values)
    return cache


def key_cells(contexts: list[Context]) -> torch.Tensor:
    longest = max(len(context.block_table) for context in contexts)
    tables = [
        context.block_table + context.block_table[:1] * (longest - len(context.block_table)) for context in contexts
    ]
    return torch.tensor([2 * block for table in tables for block in table])


def make_batch(contexts: list[Context], block_size: int) -> PagedBatch:
    """All single tokens in one decode group, the others as chunks."""
    offsets = [0]
    for context in contexts:
        offsets.append(offsets[-1] + context.num_new)
    chunks = tuple(
        Chunk(start, start + c.num_new, c.length, None if c.num_new == c.length else key_cells([c]))
        for start, c in zip(offsets, contexts, strict=False)
        if c.num_new > 1
    )
    single = [(start, c) for start, c in zip(offsets, contexts, strict=False) if c.num_new == 1]
    groups = ()
    if single:
        lengths = torch.tensor([c.length for _, c in single])
        groups = (DecodeGroup(torch.tensor([s for s, _ in single]), key_cells([c for _, c in single]), lengths),)
    new_rows = [key_row_ids(c.block_table, range(c.length - c.num_new, c.length), block_size) for c in contexts]
    return PagedBatch(torch.cat([torch.from_numpy(rows) for rows in new_rows]), chunks, groups)


def run(contexts: list[Context], block_size: int, options: AttentionOptions) -> torch.Tensor:
    query = torch.cat([c.query for c in contexts])
    key = torch.cat([c.keys[c.length - c.num_new :] for c in contexts])
    value = torch.cat([c.values[c.length - c.num_new :] for c in contexts])
    batch = make_batch(contexts, block_size)
    return paged_attention(query, key, value, fill_cache(contexts, block_size), batch, options)


MIXED_STEPS = {
    "one fresh prompt": [(9, 9)],
    "a prompt longer than a block of queries": [(300, 300)],
    "a chunk after a prefix": [(290, 150)],
    "decode": [(1, 1), (17, 1), (40, 1)],
    "drafts": [(33, 4), (12, 3)],
    "everything": [(20, 20), (1, 1), (180, 140), (31, 1), (35, 4), (6, 6), (64, 1)],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("shapes", MIXED_STEPS.values(), ids=MIXED_STEPS.keys())
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_every_kind_of_row_attends_as_defined(
    shapes: list[tuple[int, int]], options: AttentionOptions, block_size: int
) -> None:
    """Fresh prompts, chunks, decode tokens and drafts, in one step, over any block size and option."""
    contexts = make_contexts(shapes, block_size, torch.float32)
    expected = torch.cat([reference(context, options) for context in contexts])
    torch.testing.assert_close(run(contexts, block_size, options).double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_bfloat16_is_accumulated_in_float32(options: AttentionOptions) -> None:
    """Over 600 tokens the error stays that of rounding the inputs and the result, not of a bfloat16 sum."""
    contexts = make_contexts([(600, 1), (600, 40)], 16, torch.bfloat16)
    expected = torch.cat([reference(context, options) for context in contexts])
    torch.testing.assert_close(run(contexts, 16, options).double(), expected, atol=6e-3, rtol=2e-2)


def test_masks_are_built_once_a_step() -> None:
    """Layers with and without a window share one batch; each gets its own mask."""
    contexts = make_contexts([(20, 5), (9, 1)], 4, torch.float32)
    batch, cache = make_batch(contexts, 4), fill_cache(contexts, 4)
    query = torch.cat([c.query for c in contexts])
    new = [(c.keys[c.length - c.num_new :], c.values[c.length - c.num_new :]) for c in contexts]
    key, value = torch.cat([k for k, _ in new]), torch.cat([v for _, v in new])
    for options in (OPTIONS["plain"], OPTIONS["window"], replace(OPTIONS["plain"], sliding_window=3), OPTIONS["plain"]):
        expected = torch.cat([reference(context, options) for context in contexts])
        got = paged_attention(query, key, value, cache, batch, options)
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
    assert len(batch.masks) == 2 * 3
