"""Which prompt chunks run: chunk sizes, order, blocks."""

from hypothesis import given, settings, strategies as st
from twinpool.cluster.protocol.messages import SamplingParams
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.prefill_scheduler import PrefillScheduler
from twinpool.engine.sequence import ScheduledRow, Sequence


def prompt(name: str, length: int) -> Sequence:
    return Sequence(name, 1, list(range(length)), length, SamplingParams())


def chunks(rows: list[ScheduledRow]) -> list[tuple[str, int, int, bool]]:
    return [(row.sequence.request_id, row.start, row.end, row.samples) for row in rows]


def run_to_the_end(scheduler: PrefillScheduler, most_steps: int = 1000) -> list[list[tuple[str, int, int, bool]]]:
    """Return every step's chunks until nothing is scheduled."""
    steps: list[list[tuple[str, int, int, bool]]] = []
    while rows := scheduler.schedule():
        assert len(steps) < most_steps, "it never ends"
        steps.append(chunks(rows))
        scheduler.completed(rows)
    return steps


def test_a_long_prompt_runs_in_chunks_and_only_the_last_samples() -> None:
    """20,000 tokens with a budget of 8,192 run as 8,192, 8,192, 3,616."""
    scheduler = PrefillScheduler(BlockPool(1250), 16, 8192)
    scheduler.add(prompt("long", 20_000), 0.0, 1000.0)
    assert run_to_the_end(scheduler) == [
        [("long", 0, 8192, False)],
        [("long", 8192, 16384, False)],
        [("long", 16384, 20000, True)],
    ]
    assert len(scheduler) == 0


def test_a_prompt_as_long_as_the_budget_is_one_chunk() -> None:
    scheduler = PrefillScheduler(BlockPool(8), 4, 8)
    scheduler.add(prompt("even", 16), 0.0, 1000.0)
    assert run_to_the_end(scheduler) == [[("even", 0, 8, False)], [("even", 8, 16, True)]]


def test_what_a_long_prompt_leaves_of_the_budget_goes_to_the_next() -> None:
    """A step holds at most the budget, over all its rows."""
    scheduler = PrefillScheduler(BlockPool(100), 4, 10)
    for name, length in (("a", 4), ("b", 13), ("c", 5)):
        scheduler.add(prompt(name, length), 0.0, 1e9)  # as good as no predicted time: the order of arrival counts
    assert run_to_the_end(scheduler)[0] == [("a", 0, 4, True), ("c", 0, 5, True), ("b", 0, 1, False)]


def test_a_short_prompt_overtakes_a_long_one_of_the_same_moment() -> None:
    """The order is arrival plus predicted time."""
    scheduler = PrefillScheduler(BlockPool(100), 4, 1000)
    scheduler.add(prompt("long", 100), 0.0, 10.0)
    scheduler.add(prompt("short", 10), 0.0, 10.0)
    assert [row[0] for row in chunks(scheduler.schedule())] == ["short", "long"]


def test_nothing_waits_for_ever_behind_newcomers() -> None:
    """A short prompt that comes after the long one's predicted end does not overtake it."""
    scheduler = PrefillScheduler(BlockPool(100), 4, 1000)
    scheduler.add(prompt("long", 100), 0.0, 10.0)  # predicted to take 10 s
    scheduler.add(prompt("short", 10), 9.5, 10.0)
    assert [row[0] for row in chunks(scheduler.schedule())] == ["long", "short"]


def test_a_prompt_without_blocks_holds_back_those_behind_it() -> None:
    """Otherwise small prompts would take every block that comes free and a large one would starve."""
    pool = BlockPool(10)
    pool.allocate(("other", 1), 6, "sequence")
    scheduler = PrefillScheduler(pool, 4, 1000)
    scheduler.add(prompt("large", 20), 0.0, 1e9)
    scheduler.add(prompt("small", 4), 1.0, 1e9)
    assert scheduler.schedule() == []
    pool.release(("other", 1))
    assert [row[0] for row in chunks(scheduler.schedule())] == ["large", "small"]


def test_a_prompt_without_blocks_does_not_stop_one_that_has_them() -> None:
    """Regression: an overtaking newcomer that waits for blocks kept the prompt that held them from ever ending."""
    pool = BlockPool(10)
    scheduler = PrefillScheduler(pool, 4, 8)
    scheduler.add(prompt("running", 32), 0.0, 1.0)
    scheduler.completed(scheduler.schedule())
    scheduler.add(prompt("newcomer", 16), 1.0, 1.0)  # sorts first, needs 4 blocks, 2 are free
    assert chunks(scheduler.schedule()) == [("running", 8, 16, False)]


def test_a_prompt_gets_all_its_blocks_before_its_first_chunk() -> None:
    pool = BlockPool(10)
    scheduler = PrefillScheduler(pool, 4, 8)
    sequence = prompt("a", 33)
    scheduler.add(sequence, 0.0, 1.0)
    scheduler.schedule()
    assert len(sequence.block_table) == 9
    assert pool.num_free == 1


def test_scored_prompts_share_a_bound_of_their_own() -> None:
    """Their chunks keep logits; others fill what is left of the budget, and nobody else waits."""
    scheduler = PrefillScheduler(BlockPool(1000), 4, 1000)
    for name, length in (("a", 100), ("b", 300), ("c", 50)):
        sequence = prompt(name, length)
        sequence.sampling = SamplingParams(scores_prompt=name != "c")
        scheduler.add(sequence, 0.0, 1e9)
    assert run_to_the_end(scheduler) == [
        [("c", 0, 50, True), ("a", 0, 100, True), ("b", 0, 156, False)],
        [("b", 156, 300, True)],
    ]


def test_a_scored_prompt_beyond_the_bound_takes_no_blocks_yet() -> None:
    pool = BlockPool(1000)
    scheduler = PrefillScheduler(pool, 4, 1000)
    for name in ("a", "b"):
        sequence = prompt(name, 256)
        sequence.sampling = SamplingParams(scores_prompt=True)
        scheduler.add(sequence, 0.0, 1e9)
    assert chunks(scheduler.schedule()) == [("a", 0, 256, True)]
    assert pool.num_free == 1000 - 64


def test_queued_tokens_are_those_not_yet_computed() -> None:
    scheduler = PrefillScheduler(BlockPool(100), 4, 8)
    scheduler.add(prompt("a", 20), 0.0, 1.0)
    scheduler.add(prompt("b", 5), 0.0, 1.0)
    assert scheduler.num_queued_tokens == 25
    rows = scheduler.schedule()
    assert scheduler.num_queued_tokens == 25, "scheduled is not computed"
    scheduler.completed(rows)
    assert scheduler.num_queued_tokens == 17
    scheduler.remove(("b", 1))
    scheduler.remove(("unknown", 1))
    assert scheduler.keys() == [("a", 1)]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    gaps=st.lists(st.floats(0, 5), min_size=8, max_size=8),
    budget=st.integers(1, 40),
    num_blocks=st.integers(15, 40),
)
@settings(max_examples=150, deadline=None)
def test_every_token_runs_once_and_in_order_whatever_arrives_when(
    lengths: list[int], gaps: list[float], budget: int, num_blocks: int
) -> None:
    """One prompt arrives a step; finished ones free their blocks at once. All end, within the budget, in order."""
    pool = BlockPool(num_blocks)
    scheduler = PrefillScheduler(pool, 4, budget)
    arrivals = [(prompt(str(i), length), sum(gaps[: i + 1])) for i, length in enumerate(lengths)]
    done: dict[str, int] = {str(i): 0 for i in range(len(lengths))}
    num_steps = 0
    while arrivals or len(scheduler):
        if arrivals:
            scheduler.add(*arrivals.pop(0), 10.0)
        rows = scheduler.schedule()
        assert rows, "prompts wait and nothing runs"
        assert sum(row.end - row.start for row in rows) <= budget
        for row in rows:
            assert row.start == done[row.sequence.request_id]
            done[row.sequence.request_id] = row.end
            assert row.samples == (row.end == len(row.sequence.token_ids))
        scheduler.completed(rows)
        for row in rows:
            if row.samples:
                pool.release(row.sequence.key)
        num_steps += 1
        assert num_steps < 1000
    assert list(done.values()) == lengths
    assert pool.num_free == num_blocks
