"""Which PROMPT worker is predicted to be free first: by measured costs and what is observed, or by its rate."""

from collections import Counter, deque

import pytest
from twinpool.cluster.costs import CostModel
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.router.fair_queue import Ticket
from twinpool.router.placement import Placement

FIRST, SECOND, RECEIVER = WorkerId("prompt-0", "a"), WorkerId("prompt-1", "b"), WorkerId("completion-0", "c")
QUADRATIC = CostModel(prefill_overhead_s=0.01, prefill_per_token_s=1e-4, prefill_per_token_sq_s=1e-6)


def placement(cost: CostModel | None) -> Placement:
    pools = Placement()
    for worker in (FIRST, SECOND):
        pools.add_prompt(worker, 100_000, cost)
    pools.add_completion(RECEIVER, num_blocks=10_000, block_size=16, max_num_seqs=100)
    return pools


def placed_on(pools: Placement, lengths: list[int]) -> list[str]:
    names: list[str] = []
    for order, num_tokens in enumerate(lengths):
        pools.enqueue(Ticket(order, str(order), num_tokens), now=0.0)
        pair = pools.place_next(num_tokens, now=0.0)
        assert pair is not None
        names.append(pair[0].name)
    return names


def test_costs_know_that_a_long_prompt_takes_longer_than_as_many_tokens_in_short_ones() -> None:
    """By the rate 1,900 tokens are less than 2 x 1,000; by the costs they take 3.8 s, and the others 2.2 s together."""
    lengths = [1900, 1000, 1000, 10]
    assert placed_on(placement(None), lengths) == ["prompt-0", "prompt-1", "prompt-1", "prompt-0"]
    assert placed_on(placement(QUADRATIC), lengths) == ["prompt-0", "prompt-1", "prompt-1", "prompt-1"]


def test_a_worker_that_is_slower_than_its_costs_gets_less() -> None:
    """The same machine under other load: what is predicted is scaled by what was observed."""
    pools = placement(QUADRATIC)
    view = pools.prefilled("0", FIRST, 0.0)
    assert view is not None
    for _ in range(20):
        view.observe(1000, 10 * QUADRATIC.prefill_s(1000))
    assert view.slowdown == pytest.approx(10, rel=0.01)
    assert placed_on(pools, [100, 100, 100]) == ["prompt-0", "prompt-1", "prompt-1"]


@pytest.mark.parametrize("num_at_once", [1, 7, 256])
def test_single_turns_reach_every_worker(num_at_once: int) -> None:
    """Regression: of workers that are all idle the first by name got every request."""
    pools, counts = Placement(), Counter[str]()
    for number in range(5):
        pools.add_prompt(WorkerId(f"prompt-{number}", "a"), 100_000)
        pools.add_completion(WorkerId(f"completion-{number}", "a"), num_blocks=10_000, block_size=16, max_num_seqs=100)
    running: deque[str] = deque()
    for number in range(256):
        if len(running) == num_at_once:
            pools.forget(running.popleft(), now=0.0)
        pools.enqueue(Ticket(number, str(number), 20), now=0.0)
        pair = pools.place_next(20, now=0.0)
        assert pair is not None
        counts.update(worker.name for worker in pair)
        pools.granted(str(number), pair[1])
        pools.prefilled(str(number), pair[0], 0.0)
        running.append(str(number))
    assert len(counts) == 10
    assert min(counts.values()) > 0.5 * 256 / 5


def completions_chosen(at_s: float, number: int, num_blocks: int = 10_000) -> list[str]:
    """Place requests when completion-0 has always been there, and completion-1 since 100 s."""
    pools = Placement()
    pools.add_prompt(FIRST, 100_000)
    pools.add_completion(WorkerId("completion-0", "a"), num_blocks, block_size=16, max_num_seqs=100)
    pools.add_completion(WorkerId("completion-1", "b"), 10_000, block_size=16, max_num_seqs=100, joined_s=100.0)
    names: list[str] = []
    for order in range(number):
        pools.enqueue(Ticket(order, str(order), 10), at_s)
        pair = pools.place_next(10, at_s)
        assert pair is not None
        names.append(pair[1].name)
    return names


@pytest.mark.parametrize(("at_s", "most"), [(100.0, 2), (102.0, 4), (105.0, 8), (110.0, 10)])
def test_a_completion_worker_that_has_just_come_starts_slowly(at_s: float, most: int) -> None:
    """It would get all of the next twenty otherwise, being empty; its part grows to a half within ten seconds."""
    chosen = Counter(completions_chosen(at_s, 20))
    assert most - 1 <= chosen["completion-1"] <= most


def test_a_worker_that_has_just_come_takes_what_nobody_else_has_room_for() -> None:
    assert completions_chosen(100.0, 5, num_blocks=5) == ["completion-0"] * 3 + ["completion-1"] * 2


def test_a_prompt_worker_that_has_just_come_starts_slowly() -> None:
    def chosen(at_s: float) -> list[str]:
        pools = Placement()
        pools.add_prompt(FIRST, 100_000)
        pools.add_prompt(SECOND, 100_000, joined_s=100.0)
        pools.add_completion(RECEIVER, num_blocks=10_000, block_size=16, max_num_seqs=100)
        names: list[str] = []
        for order in range(20):
            pools.enqueue(Ticket(order, str(order), 10), at_s)
            pair = pools.place_next(10, at_s)
            assert pair is not None
            names.append(pair[0].name)
        return names

    assert chosen(100.0).count("prompt-1") == 1
    assert chosen(105.0).count("prompt-1") in (6, 7)
    assert chosen(110.0).count("prompt-1") == 10
