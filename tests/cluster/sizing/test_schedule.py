"""Whatever the workers' limits are, no shape exceeds them, and there are enough shapes to fit."""

from dataclasses import replace

from hypothesis import given, settings, strategies as st
from simulated_prober import COMPLETION, PROMPT
from twinpool.cluster.sizing.probing import ProbedWorker
from twinpool.cluster.sizing.schedule import PassShape, make_schedule


def is_within(shape: PassShape, worker: ProbedWorker) -> bool:
    num_blocks = sum(-(-sum(row) // worker.block_size) for row in shape.rows)
    return (
        len(shape.rows) <= worker.max_num_seqs
        and sum(new for _, new in shape.rows) <= worker.max_num_batched_tokens
        and max(sum(row) for row in shape.rows) <= worker.max_model_len
        and num_blocks <= worker.num_blocks
    )


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(4, 5000),
    block_size=st.sampled_from([1, 16, 32]),
    max_model_len=st.integers(32, 40_000),
    max_num_batched_tokens=st.integers(32, 8192),
    max_num_seqs=st.integers(1, 512),
    is_quick=st.booleans(),
)
def test_every_shape_keeps_the_limits(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    is_quick: bool,
) -> None:
    prompt, completion = (
        replace(
            worker,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        for worker in (PROMPT, COMPLETION)
    )
    schedule = make_schedule(prompt, completion, is_quick)
    room = num_blocks * block_size
    assert all(is_within(shape, prompt) for shape in (*schedule.prefill, schedule.prefill_control))
    assert all(is_within(shape, completion) for shape in (*schedule.decode, *schedule.fused, schedule.decode_control))
    assert all(0 < num_tokens <= min(room, max_model_len) for num_tokens in schedule.transfer_tokens)
    for shapes in (schedule.prefill, schedule.decode, schedule.fused, schedule.transfer_tokens):
        assert len(set(shapes)) == len(shapes)


def test_lengths_batches_and_sizes_reach_the_limits() -> None:
    for is_quick in (False, True):
        schedule = make_schedule(PROMPT, COMPLETION, is_quick)
        assert max(shape.chunks[0][1] for shape in schedule.prefill) == PROMPT.max_num_batched_tokens
        assert {shape.num_sequences for shape in schedule.decode} >= {1, COMPLETION.max_num_seqs}
        assert len(schedule.transfer_tokens) >= 4
        assert len(schedule.fused) >= 4
        assert any(len(shape.chunks) > 1 for shape in schedule.prefill)
        assert any(shape.chunks[0][0] for shape in schedule.prefill)
        assert min(len(schedule.prefill), len(schedule.decode)) >= 6
    assert len(make_schedule(PROMPT, COMPLETION).decode) > len(make_schedule(PROMPT, COMPLETION, is_quick=True).decode)
