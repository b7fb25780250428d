"""Every block has exactly one owner, and no generation is given twice (I1, I2)."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from state_machines import LONG, LONG_S, SHORT
from twinpool.engine.block_pool import BlockPool, blocks_for

A, B = ("a", 1), ("b", 1)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (20_000, 1250)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_the_lowest_ids_go_first_also_after_a_release() -> None:
    """Neighbours stay neighbours: released low ids are preferred to untouched high ones."""
    pool = BlockPool(8)
    first, second = pool.allocate(A, 3, "granted"), pool.allocate(B, 2, "sequence")
    assert first is not None
    assert second is not None
    assert (first.blocks, second.blocks) == ([0, 1, 2], [3, 4])
    pool.release(A)
    assert pool.extend(B, 4)
    assert second.blocks == [3, 4, 0, 1, 2, 5], "new blocks come at the end of the table"


def test_a_second_release_frees_nothing() -> None:
    """Every exit may release: a block that is free twice would be given to two owners."""
    pool = BlockPool(4)
    pool.allocate(A, 3, "granted")
    for _ in range(2):
        pool.release(A)
        assert pool.num_free == 4
    pool.check()


def test_nothing_changes_when_blocks_are_missing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(A, 5, "granted") is None
    assert pool.holding(A) is None
    assert pool.allocate(A, 3, "granted") is not None
    assert not pool.extend(A, 2)
    assert (pool.num_free, pool.num_used("granted")) == (1, 3)
    assert pool.extend(A, 1)
    assert pool.num_free == 0


def test_promotion_keeps_blocks_and_generation() -> None:
    pool = BlockPool(4)
    holding = pool.allocate(A, 2, "granted")
    assert holding is not None
    generation, blocks = holding.generation, list(holding.blocks)
    pool.promote(A)
    assert (holding.generation, holding.blocks) == (generation, blocks)
    assert (pool.num_used("granted"), pool.num_used("sequence")) == (0, 2)


def test_an_owner_may_not_allocate_twice() -> None:
    """A second table for the same owner would lose the first."""
    pool = BlockPool(4)
    pool.allocate(A, 1, "granted")
    with pytest.raises(AssertionError, match="holds blocks already"):
        pool.allocate(A, 1, "sequence")


def test_check_notices_a_block_with_two_owners_and_one_with_none() -> None:
    """The checker itself: it must see the damage it is there for."""
    pool = BlockPool(4)
    first, second = pool.allocate(A, 1, "granted"), pool.allocate(B, 1, "granted")
    assert first is not None
    assert second is not None
    second.blocks[0] = first.blocks[0]
    with pytest.raises(AssertionError, match="two owners"):
        pool.check()
    second.blocks.clear()
    with pytest.raises(AssertionError, match="lost or invented"):
        pool.check()


class AnyUse(RuleBasedStateMachine):
    """Random allocations, extensions, promotions and releases against a dictionary as the oracle."""

    owners = st.tuples(st.sampled_from("abcde"), st.integers(1, 2))
    NUM_BLOCKS = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.tables: dict[tuple[str, int], list[int]] = {}
        self.generations: dict[tuple[str, int], int] = {}
        self.seen: set[int] = set()

    @property
    def num_free(self) -> int:
        return self.NUM_BLOCKS - sum(len(table) for table in self.tables.values())

    @rule(owner=owners, number=st.integers(0, 7), use=st.sampled_from(["granted", "sequence"]))
    def allocate(self, owner: tuple[str, int], number: int, use: str) -> None:
        if owner in self.tables:
            return
        free = self.num_free
        holding = self.pool.allocate(owner, number, use)
        assert (holding is None) == (number > free)
        if holding is not None:
            assert holding.generation not in self.seen, "a generation was given twice"
            assert len(holding.blocks) == number
            self.seen.add(holding.generation)
            self.tables[owner], self.generations[owner] = list(holding.blocks), holding.generation

    @rule(owner=owners, number=st.integers(0, 4))
    def extend(self, owner: tuple[str, int], number: int) -> None:
        if owner not in self.tables:
            return
        free, before = self.num_free, self.tables[owner]
        extended = self.pool.extend(owner, number)
        holding = self.pool.holding(owner)
        assert holding is not None
        assert extended == (number <= free)
        assert holding.blocks[: len(before)] == before, "what a sequence has written stays where it is"
        assert len(holding.blocks) == len(before) + (number if extended else 0)
        self.tables[owner] = list(holding.blocks)

    @rule(owner=owners)
    def promote(self, owner: tuple[str, int]) -> None:
        if owner in self.tables:
            self.pool.promote(owner)

    @rule(owner=owners, heir=owners)
    def adopt(self, owner: tuple[str, int], heir: tuple[str, int]) -> None:
        if owner in self.tables and heir not in self.tables:
            holding = self.pool.adopt(heir, owner)
            assert holding.generation not in self.seen, "a generation was given twice"
            self.seen.add(holding.generation)
            self.tables[heir] = self.tables.pop(owner)
            self.generations[heir] = holding.generation
            del self.generations[owner]

    @rule(owner=owners)
    def release(self, owner: tuple[str, int]) -> None:
        self.pool.release(owner)
        self.tables.pop(owner, None)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        self.pool.check()
        assert self.pool.num_free == self.num_free
        assert self.pool.num_used("granted") + self.pool.num_used("sequence") + self.pool.num_free == self.NUM_BLOCKS
        held = [block for table in self.tables.values() for block in table]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(self.NUM_BLOCKS))
        assert set(self.pool.owners()) == set(self.tables)
        for owner, table in self.tables.items():
            holding = self.pool.holding(owner)
            assert holding is not None
            assert (holding.blocks, holding.generation) == (table, self.generations[owner])


AnyUse.TestCase.settings = SHORT
TestAnyUse = AnyUse.TestCase


@pytest.mark.slow
@pytest.mark.timeout(LONG_S)
def test_many_more_lives_of_a_pool() -> None:
    run_state_machine_as_test(AnyUse, settings=LONG)


def test_an_heir_gets_the_blocks_under_a_generation_of_its_own() -> None:
    pool = BlockPool(8)
    old = pool.allocate(("a", 1), 3, "granted")
    assert old is not None
    blocks, generation = list(old.blocks), old.generation
    heir = pool.adopt(("a", 2), ("a", 1))
    assert (heir.blocks, heir.use) == (blocks, "granted")
    assert heir.generation > generation
    assert pool.owners() == [("a", 2)]
    pool.check()
    pool.release(("a", 1))
    assert pool.num_free == 5, "the old owner holds nothing"
    pool.release(("a", 2))
    assert pool.num_free == 8


def test_whoever_wants_to_know_is_told_of_freed_blocks_once() -> None:
    """Blocks that pass to an heir are not free, and an owner that holds nothing frees nothing."""
    pool = BlockPool(8)
    freed: list[list[int]] = []
    pool.on_freed = lambda blocks: freed.append(list(blocks))
    pool.allocate(("a", 1), 3, "granted")
    pool.adopt(("a", 2), ("a", 1))
    pool.extend(("a", 2), 1)
    pool.promote(("a", 2))
    pool.release(("a", 1))
    assert freed == []
    pool.release(("a", 2))
    pool.release(("a", 2))
    assert freed == [[0, 1, 2, 3]]
