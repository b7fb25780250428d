"""Who goes next: one caller's requests in order, callers in proportion to their weights, and nobody never."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from twinpool.router.fair_queue import CREDIT_TOKENS, MAX_IDLE_CALLERS, MAX_RECENT_CALLERS, RECENT_S, FairQueue, Ticket
from twinpool.router.generation import Caller

LOUD, QUIET = Caller("loud"), Caller("quiet")


def ticket(order: int, caller: Caller = LOUD, cost: int = 10, priority: int = 0) -> Ticket:
    return Ticket(order, f"r{order}", cost, 0, caller, priority)


def filled(*tickets: Ticket) -> FairQueue:
    queue = FairQueue()
    for each in tickets:
        queue.add(each)
    return queue


def taken(queue: FairQueue) -> list[int]:
    return [queue.take().arrival_order for _ in range(len(queue))]


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), max_size=60))
def test_one_callers_requests_are_served_in_their_order(plan: list[tuple[int, bool]]) -> None:
    """First come, first served, whatever they cost, with arrivals and turns in any order."""
    queue, served = FairQueue(), []
    for order, (cost, is_turn) in enumerate(plan):
        queue.add(ticket(order, cost=cost))
        if is_turn:
            served.append(queue.take().arrival_order)
    assert [*served, *taken(queue)] == list(range(len(plan)))


def test_a_quiet_caller_goes_next_however_much_a_loud_one_has_queued() -> None:
    queue = filled(*(ticket(order) for order in range(100)))
    for _ in range(30):
        queue.take()
    queue.add(ticket(1000, QUIET))
    assert [queue.take().arrival_order for _ in range(3)] == [1000, 30, 31]


def test_whoever_sends_one_at_a_time_gets_no_more_than_its_share() -> None:
    """Its debt outlives its request: ten times dearer ones go every tenth time."""
    queue = filled(*(ticket(order) for order in range(200)), ticket(1000, QUIET, cost=100))
    tokens: Counter[str] = Counter()
    for turn in range(110):
        served = queue.take()
        tokens[served.caller.name] += served.cost
        if served.caller == QUIET:
            queue.add(ticket(1001 + turn, QUIET, cost=100))
    assert abs(tokens["loud"] - tokens["quiet"]) <= 110


def shared_before(num_turns: int) -> FairQueue:
    """The quiet caller asked once; since then the loud one, who has plenty left, had so many turns of 100 tokens."""
    queue = filled(ticket(999, QUIET), *(ticket(order, cost=100) for order in range(500)))
    for _ in range(1 + num_turns):
        queue.take()
    return queue


def test_a_few_requests_at_once_go_before_a_loud_callers() -> None:
    """Whoever uses less than its share may do so in bursts."""
    queue = shared_before(30)
    for order in range(1000, 1005):
        queue.add(ticket(order, QUIET, cost=CREDIT_TOKENS // 5))
    assert [queue.take().caller for _ in range(6)] == [QUIET] * 5 + [LOUD]


def test_nobody_saves_up_more_than_a_credit() -> None:
    """A caller that was away for long has no claim on all that it did not use."""
    queue = shared_before(300)
    for order in range(1000, 1100):
        queue.add(ticket(order, QUIET, cost=100))
    served = Counter(queue.take().caller.name for _ in range(60))
    assert served["quiet"] - served["loud"] == pytest.approx(CREDIT_TOKENS / 100, abs=2)


def test_a_credit_is_nothing_that_others_owe_to_the_loud_one() -> None:
    """Regression: a burst left the loud caller behind for ever, and each newcomer waited for what it had missed."""
    queue = shared_before(50)
    for order in range(1000, 1005):
        queue.add(ticket(order, QUIET, cost=CREDIT_TOKENS // 5))
    for _ in range(30):
        queue.take()
    queue.add(ticket(2000, Caller("new")))
    assert queue.take().caller.name == "new"


def test_a_single_request_goes_next_after_any_history() -> None:
    """Regression: what a quiet caller had used was given to the loud one afterwards, before the next quiet request."""
    queue = filled(*(ticket(order) for order in range(1000)))
    queue.take()
    for number in range(20):
        queue.add(ticket(2000 + number, QUIET, cost=20))
        assert queue.take().caller == QUIET
        for _ in range(10):
            assert queue.take().caller == LOUD


def test_debts_end_when_nobody_waits() -> None:
    queue = filled(ticket(0, QUIET, cost=10_000))
    queue.take()
    queue.add(ticket(1))
    queue.add(ticket(2, QUIET))
    assert taken(queue) == [1, 2], "equals, in order of their latest turn"


CALLERS = [Caller("a"), Caller("b", 2.0), Caller("c", 0.5), Caller("d", 7.0)]


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 4))
def test_backlogged_callers_are_served_by_weight_to_within_a_request_each(rng: random.Random, num_callers: int) -> None:
    """At any moment, for any two of them: tokens by weight differ by at most the largest request of both, by weight."""
    callers, largest = CALLERS[:num_callers], 200
    queue = filled(*(ticket(i, callers[i % num_callers], rng.randint(1, largest)) for i in range(300)))
    tokens = dict.fromkeys(callers, 0)
    left = Counter(each.caller for each in queue.tickets)
    while all(left.values()):
        served = queue.take()
        tokens[served.caller] += served.cost
        left[served.caller] -= 1
        for one in callers:
            for other in callers:
                bound = largest / one.weight + largest / other.weight
                assert abs(tokens[one] / one.weight - tokens[other] / other.weight) <= bound + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_nobody_starves_and_no_turn_is_wasted(rng: random.Random) -> None:
    """One caller's single request goes in bounded time, although others, old and ever new, ask without end."""
    queue, largest = FairQueue(), 100
    others = [Caller(f"other-{i}") for i in range(3)]
    order = 0
    for _ in range(30):
        queue.add(ticket(order := order + 1, rng.choice(others), rng.randint(1, largest)))
    for _ in range(rng.randint(0, 20)):
        queue.take()
    queue.add(ticket(10_000, QUIET, cost=largest))
    num_turns = 0
    while queue.take().arrival_order != 10_000:
        num_turns += 1
        assert num_turns <= 4 * 3 * largest, "starved"
        newcomer = Caller(f"new-{num_turns}") if rng.random() < 0.7 else rng.choice(others)
        queue.add(ticket(order := order + 1, newcomer, rng.randint(1, largest)))
    assert queue.head() is not None, "as long as anybody waits, somebody goes"


def test_an_old_caller_is_not_starved_by_ever_new_ones() -> None:
    """Regression: who came new went first, so a loud caller with many names shut everybody else out."""
    queue = filled(*(ticket(order) for order in range(20)))
    order = 100
    served: Counter[str] = Counter()
    for turn in range(100):
        for _ in range(2):
            queue.add(ticket(order := order + 1, Caller(f"new-{turn}-{order}")))
        served[queue.take().caller.name] += 1
    assert served["loud"] >= 2


def test_priority_counts_within_a_caller_and_not_against_others() -> None:
    queue = filled(ticket(0), ticket(1, priority=-1), ticket(2, QUIET, priority=5), ticket(3, QUIET, priority=5))
    assert taken(queue) == [1, 2, 0, 3]


def test_what_was_taken_comes_back_to_the_front_and_is_not_paid_twice() -> None:
    queue = filled(ticket(0), ticket(1), ticket(2, QUIET), ticket(3, QUIET))
    first, second = queue.take(), queue.take()
    assert (first.caller, second.caller) == (LOUD, QUIET)
    queue.add(second)
    queue.add(first)
    assert taken(queue) == [0, 2, 1, 3], "the older one first, before all others, then as if nothing had been"


def test_only_the_first_turn_is_paid() -> None:
    """Who was handed back for want of blocks has had nothing for a second payment."""
    queue = filled(ticket(0, cost=5000), ticket(1, cost=5000), ticket(2, QUIET, 5000), ticket(3, QUIET, 5000))
    first, _ = queue.take(), queue.take()
    queue.add(first)
    assert taken(queue) == [0, 1, 3], "the loud one had its turn before the quiet one, and owes no more than that one"


def test_what_has_ended_is_forgotten_wherever_it_was() -> None:
    queue = filled(ticket(0), ticket(1))
    queue.take()
    queue.forget("r0")
    queue.forget("r1")
    queue.forget("unknown")
    assert (len(queue), queue.head(), queue.num_tokens, queue.num_prompt_tokens) == (0, None, 0, 0)
    queue.add(ticket(0))
    queue.add(ticket(7, priority=-9))
    assert taken(queue) == [7, 0], "the same name later is a new request"


def test_the_head_stays_until_the_queue_changes() -> None:
    queue = filled(ticket(1), ticket(2))
    assert queue.head() == queue.head() == ticket(1)
    queue.add(ticket(0))
    assert queue.head() == ticket(0)


@pytest.mark.parametrize(
    ("num_own", "ahead"),
    [(0, 0), (1, 10 + 10), (5, 50 + 50), (90, 900 + 500)],
)
def test_what_goes_before_a_request_is_what_is_its_own_and_as_much_of_others(num_own: int, ahead: int) -> None:
    queue = filled(*(ticket(order) for order in range(50)), *(ticket(100 + i, QUIET) for i in range(num_own)))
    assert queue.cost_ahead(ticket(999, QUIET)) == ahead


def test_what_is_more_urgent_of_its_own_has_less_before_it() -> None:
    queue = filled(*(ticket(order) for order in range(50)))
    assert queue.cost_ahead(ticket(99, priority=1)) == 500
    assert queue.cost_ahead(ticket(99, priority=-1)) == 0


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_prediction_of_what_goes_before_comes_true(rng: random.Random) -> None:
    """When nobody else comes: to within one request of each caller."""
    queue = filled(*(ticket(i, rng.choice(CALLERS), rng.randint(1, 50)) for i in range(40)))
    for _ in range(rng.randint(0, 20)):
        queue.take()
    mine = ticket(1000, rng.choice(CALLERS), 20)
    predicted, actual = queue.cost_ahead(mine), 0
    queue.add(mine)
    while (served := queue.take()) != mine:
        actual += served.cost
    weights = sum(caller.weight for caller in CALLERS) / mine.caller.weight
    assert abs(predicted - actual) <= 50 * (len(CALLERS) + weights)


def test_a_queue_is_shared_when_several_asked_lately() -> None:
    queue = FairQueue()
    queue.note_caller(LOUD, 0.0)
    assert not queue.is_shared(1.0)
    queue.note_caller(QUIET, 2.0)
    assert queue.is_shared(RECENT_S)
    queue.note_caller(LOUD, RECENT_S + 2.5)
    assert not queue.is_shared(RECENT_S + 2.5), "the quiet one has been away for too long"


def test_callers_without_end_take_bounded_room() -> None:
    """I8: names are the clients' to invent."""
    queue = FairQueue()
    for order in range(2 * MAX_RECENT_CALLERS):
        caller = replace(QUIET, name=f"c{order}")
        queue.note_caller(caller, float(order))
        queue.add(ticket(order, caller))
        if order >= 20:
            queue.take()
    assert queue.num_callers <= MAX_IDLE_CALLERS + 100
