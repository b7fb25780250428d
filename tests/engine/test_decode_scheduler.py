"""Which sequences decode, and who gives way when blocks run out."""

import random

import pytest
from hypothesis import given, settings, strategies as st
from twinpool.cluster.protocol.messages import SamplingParams
from twinpool.engine.block_pool import BlockPool, blocks_for
from twinpool.engine.decode_scheduler import DecodeScheduler
from twinpool.engine.sequence import ScheduledRow, Sequence

BLOCK_SIZE = 4


def start(scheduler: DecodeScheduler, pool: BlockPool, name: str, length: int, order: int) -> Sequence:
    """Admit a sequence whose prompt of `length` tokens is in the cache and whose first token is known."""
    holding = pool.allocate((name, 1), blocks_for(length + 1, BLOCK_SIZE), "sequence")
    assert holding is not None
    sequence = Sequence(name, 1, list(range(length + 1)), length, SamplingParams(), order, length, holding.blocks)
    scheduler.add(sequence)
    return sequence


def advance(rows: list[ScheduledRow]) -> None:
    for row in rows:
        row.sequence.num_computed_tokens = row.end
        row.sequence.token_ids.append(0)


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def test_each_step_decodes_one_token_of_every_sequence() -> None:
    pool = BlockPool(20)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 8)
    start(scheduler, pool, "b", 9, 1)
    start(scheduler, pool, "a", 5, 0)
    rows, preempted = scheduler.schedule()
    assert [(r.sequence.request_id, r.start, r.end, r.samples) for r in rows] == [
        ("a", 5, 6, True),
        ("b", 9, 10, True),
    ]
    assert preempted == []


def test_a_sequence_gets_its_next_block_only_when_it_needs_it() -> None:
    pool = BlockPool(3)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 8)
    sequence = start(scheduler, pool, "a", 6, 0)
    tables: list[int] = []
    for _ in range(4):
        rows, _ = scheduler.schedule()
        tables.append(len(sequence.block_table))
        advance(rows)
    assert tables == [2, 2, 3, 3], "tokens 7, 8, 9, 10"


def test_the_newest_is_preempted_and_its_blocks_are_free() -> None:
    """The newest by arrival, not the one that asked for the block, nor the one admitted last."""
    pool = BlockPool(4)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 8)
    start(scheduler, pool, "newest", 3, 9)
    start(scheduler, pool, "oldest", 3, 1)
    middle = start(scheduler, pool, "middle", 7, 5)
    advance([ScheduledRow(middle, 7, 8, True)])  # needs a third block, none is free
    rows, preempted = scheduler.schedule()
    assert names(preempted) == ["newest"]
    assert names([row.sequence for row in rows]) == ["oldest", "middle"]
    assert pool.holding(("newest", 1)) is None
    assert sorted(scheduler.keys()) == [("middle", 1), ("oldest", 1)]
    pool.check()


def test_a_sequence_that_is_itself_the_newest_gives_way() -> None:
    pool = BlockPool(2)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 8)
    start(scheduler, pool, "old", 3, 0)
    newest = start(scheduler, pool, "new", 3, 1)
    advance([ScheduledRow(newest, 3, 4, True)])
    rows, preempted = scheduler.schedule()
    assert (names([row.sequence for row in rows]), names(preempted)) == (["old"], ["new"])


@pytest.mark.parametrize("admitted", [("a", "b"), ("b", "a")])
def test_of_two_with_the_same_number_it_is_always_the_same_that_gives_way(admitted: tuple[str, str]) -> None:
    """Each router numbers its own requests: two that preempted each other in turn would both get on more slowly."""
    pool = BlockPool(2)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 8)
    for name in admitted:
        advance([ScheduledRow(start(scheduler, pool, name, 3, 7), 3, 4, True)])
    assert names(scheduler.schedule()[1]) == ["b"]


def test_an_already_scheduled_row_of_a_preempted_sequence_does_not_run() -> None:
    """With turns, a sequence may be served before an older one takes its blocks: its row must go as well."""
    pool = BlockPool(3)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 8)
    first = start(scheduler, pool, "first", 3, 7)
    second = start(scheduler, pool, "second", 7, 7)  # same age: the later attempt counts as newer
    second.attempt, first.attempt = 1, 1
    advance([ScheduledRow(second, 7, 8, True)])
    rows, preempted = scheduler.schedule()
    running = {row.sequence.key for row in rows}
    assert running == set(scheduler.keys())
    assert not running & {sequence.key for sequence in preempted}


def test_beyond_the_budget_sequences_take_turns() -> None:
    """Nobody is left out: over any few steps everyone gets the same number of tokens, plus or minus one."""
    pool = BlockPool(100)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 3)
    for i in range(5):
        start(scheduler, pool, f"s{i}", 3, i)
    turns: dict[str, int] = {}
    for _ in range(10):
        rows, _ = scheduler.schedule()
        assert len(rows) == 3
        advance(rows)
        for row in rows:
            turns[row.sequence.request_id] = turns.get(row.sequence.request_id, 0) + 1
    assert turns == {f"s{i}": 6 for i in range(5)}


def test_remove_forgets_and_leaves_the_blocks_to_the_caller() -> None:
    pool = BlockPool(4)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 8)
    sequence = start(scheduler, pool, "a", 3, 0)
    assert scheduler.get(sequence.key) is sequence
    scheduler.remove(sequence.key)
    scheduler.remove(sequence.key)
    assert scheduler.get(sequence.key) is None
    assert (len(scheduler), pool.num_free) == (0, 3)


@given(seed=st.integers(0, 10_000), budget=st.integers(1, 6), num_blocks=st.integers(8, 24))
@settings(max_examples=150, deadline=None)
def test_a_random_life_keeps_every_invariant(seed: int, budget: int, num_blocks: int) -> None:
    """Arrivals, steps, ends: no row without its blocks, nobody preempted while a newer one stays."""
    rng = random.Random(seed)
    pool = BlockPool(num_blocks)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, budget)
    orders = rng.sample(range(1000), 1000)
    for step in range(60):
        length = rng.randrange(1, 12)
        if blocks_for(length + 1, BLOCK_SIZE) <= pool.num_free and rng.random() < 0.5:
            start(scheduler, pool, f"s{step}", length, orders[step])
        before = {key: scheduler.get(key) for key in pool.owners()}
        rows, preempted = scheduler.schedule()
        pool.check()
        assert set(pool.owners()) == set(scheduler.keys()) == set(before) - {s.key for s in preempted}
        assert len(rows) <= budget
        assert len({row.sequence.key for row in rows}) == len(rows)
        for row in rows:
            assert row.end - row.start == 1
            assert row.end == len(row.sequence.token_ids)
            assert len(row.sequence.block_table) >= blocks_for(row.end, BLOCK_SIZE)
        kept = [s.arrival_order for s in before.values() if s is not None and s not in preempted]
        assert not preempted or not kept or min(s.arrival_order for s in preempted) > max(kept)
        assert rows or not scheduler.keys(), "sequences are there and none runs"
        advance(rows)
        for key in pool.owners():
            if rng.random() < 0.1:
                scheduler.remove(key)
                pool.release(key)


@pytest.mark.parametrize("num_sequences", [1, 5])
def test_the_oldest_always_ends(num_sequences: int) -> None:
    """Whoever is oldest runs to the last block of the pool; the others make room, newest first."""
    pool = BlockPool(10)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 8)
    for i in range(num_sequences):
        start(scheduler, pool, f"s{i}", 4, i)
    gone: list[str] = []
    while len(scheduler.get(("s0", 1)).token_ids) < 40:  # type: ignore[union-attr]
        rows, preempted = scheduler.schedule()
        gone += names(preempted)
        advance(rows)
    assert gone == [f"s{i}" for i in range(num_sequences - 1, 0, -1)]


def test_a_turn_that_gives_way_passes_on_to_those_who_run() -> None:
    """Regression: the turn's only sequence was preempted, and the step was empty although others could run."""
    pool = BlockPool(3)
    scheduler = DecodeScheduler(pool, BLOCK_SIZE, 1)
    newest = start(scheduler, pool, "newest", 7, 2)
    start(scheduler, pool, "older", 2, 1)
    advance([ScheduledRow(newest, 7, 8, True)])
    rows, preempted = scheduler.schedule()
    assert (names([row.sequence for row in rows]), names(preempted)) == (["older"], ["newest"])
