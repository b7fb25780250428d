"""What a packed step says about its rows."""

import torch
from hypothesis import given, settings, strategies as st
from twinpool.cluster.protocol.messages import SamplingParams
from twinpool.engine.batch import MAX_PADDING_TOKENS, build_batch
from twinpool.engine.sequence import ScheduledRow, Sequence

CPU = torch.device("cpu")


def row(first_token: int, length: int, start: int, block_size: int, first_block: int = 0) -> ScheduledRow:
    """Schedule tokens [start, length) of a sequence whose tokens and blocks are consecutive numbers."""
    tokens = [first_token + i for i in range(length)]
    table = [first_block + i for i in range(-(-length // block_size))]
    return ScheduledRow(Sequence("r", 1, tokens, 1, SamplingParams(), block_table=table), start, length, samples=True)


def test_rows_are_packed_in_order_with_their_own_positions() -> None:
    """Token ids, positions and sampled places of a prompt, a decode token and a chunk."""
    rows = [row(100, 3, 0, 4), row(200, 6, 5, 4), row(300, 9, 7, 4)]
    rows[2] = ScheduledRow(rows[2].sequence, 7, 9, samples=False)
    batch = build_batch(rows, 4, CPU)
    assert batch.input_ids.tolist() == [[100, 101, 102, 205, 307, 308]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 5, 7, 8]]
    assert batch.logits_to_keep.tolist() == [2, 3]
    assert batch.sampling_rows == (0, 1)


def test_logits_that_score_a_prompt_come_behind_those_that_sample() -> None:
    """Logits of token i score token i + 1, up to the prompt's last; its outputs and other rows are not scored."""
    scored = SamplingParams(scores_prompt=True)
    tokens, table = list(range(9)), [0, 1, 2]
    chunk = ScheduledRow(Sequence("a", 1, tokens, 9, scored, block_table=table), 3, 6, samples=False)
    last = ScheduledRow(Sequence("b", 1, tokens, 7, scored, block_table=table), 4, 9, samples=True)
    decode = ScheduledRow(Sequence("c", 1, tokens, 8, scored, block_table=table), 8, 9, samples=True)
    assert [each.scored for each in (chunk, last, row(0, 9, 0, 4))] == [range(4, 7), range(5, 7), range(0)]
    assert not decode.scored
    batch = build_batch([row(0, 2, 0, 4), chunk, last, decode], 4, CPU)
    assert batch.logits_to_keep.tolist() == [1, 9, 10, 2, 3, 4, 5, 6]
    assert batch.sampling_rows == (0, 2, 3)


def test_each_token_is_written_where_its_block_table_says() -> None:
    """Flat row 2 * block * block_size + offset; a value lies block_size further on."""
    batch = build_batch([row(0, 6, 3, 4, first_block=5)], 4, CPU)
    assert batch.paged.row_ids.tolist() == [5 * 8 + 3, 6 * 8 + 0, 6 * 8 + 1]


def test_only_a_row_from_the_very_start_attends_to_the_packed_row_itself() -> None:
    fresh, chunk = build_batch([row(0, 9, 0, 4), row(0, 9, 2, 4, first_block=3)], 4, CPU).paged.chunks
    assert fresh.key_cells is None
    assert chunk.key_cells is not None
    assert chunk.key_cells.tolist() == [6, 8, 10]
    assert (chunk.start, chunk.end, chunk.num_context_tokens) == (9, 16, 9)


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40), block_size=st.sampled_from([1, 7, 16, 32]))
@settings(max_examples=60, deadline=None)
def test_decode_groups_hold_every_row_once_and_pad_little(lengths: list[int], block_size: int) -> None:
    """Padding within a group is bounded, and each row's cells begin with its own blocks."""
    rows = [row(0, n, n - 1, block_size, first_block=10_000 * i) for i, n in enumerate(lengths)]
    groups = build_batch(rows, block_size, CPU).paged.decode_groups
    assert sorted(torch.cat([group.queries for group in groups]).tolist()) == list(range(len(lengths)))
    for group in groups:
        found = group.context_lengths
        assert (found.max() - found).sum() <= MAX_PADDING_TOKENS
        cells = group.key_cells.view(len(found), -1)
        for query, context, own in zip(group.queries.tolist(), found.tolist(), cells.tolist(), strict=True):
            assert context == lengths[query]
            num_blocks = -(-context // block_size)
            assert own[:num_blocks] == [2 * (10_000 * query + i) for i in range(num_blocks)]
            assert set(own[num_blocks:]) <= {own[0]}
