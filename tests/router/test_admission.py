"""Who is let in: full queues, predicted waits, and when to come back."""

from typing import Any

import pytest
from twinpool.cluster.protocol.messages import SamplingParams
from twinpool.router.admission import MAX_RETRY_S, MIN_RETRY_S, Admission, AdmissionLimits, BlockRoom
from twinpool.router.fair_queue import FairQueue, Ticket
from twinpool.router.generation import Caller, GenerationFailed, GenerationRequest

LOUD, QUIET = Caller("loud"), Caller("quiet")
ROOMY = BlockRoom(num_wanted=0, num_free=10**6, num_all=10**6)
NEVER = 1e9


def ticket(order: int, caller: Caller = LOUD, cost: int = 10, priority: int = 0) -> Ticket:
    return Ticket(order, f"r{order}", cost, 0, caller, priority)


class Queue:
    """A queue with `number` requests of a loud caller, that drains `rate` tokens a second if that was measured."""

    def __init__(self, number: int, rate: float | None = 10.0, cost: int = 10, **limits: Any) -> None:
        self.queue = FairQueue()
        self.admission = Admission(AdmissionLimits(**limits), self.queue)
        for order in range(number):
            self.queue.add(ticket(order, cost=cost))
        if rate is not None:
            for second in range(100):
                self.admission.drained(int(rate) if second else 0, float(second), is_waiting=True)

    def displaced_by(self, new: Ticket) -> list[int] | str:
        answer = self.admission.displaced(new)
        return answer.code if isinstance(answer, GenerationFailed) else [each.arrival_order for each in answer]


def refused(answer: GenerationFailed | None) -> float | None:
    assert isinstance(answer, GenerationFailed)
    assert answer.code == "queue_full"
    return answer.retry_after_s


def test_with_room_nobody_gives_up_a_place() -> None:
    queue = Queue(3, max_queued_requests=4, max_queued_tokens=40)
    assert queue.admission.full(LOUD) is None
    assert queue.displaced_by(ticket(9)) == []


def test_a_full_queue_refuses_those_who_have_most_of_it() -> None:
    queue = Queue(4, max_queued_requests=4)
    assert refused(queue.admission.full(LOUD)) == pytest.approx(2.0, rel=0.1), "half of 40 tokens, at 10 a second"
    assert queue.displaced_by(ticket(9)) == "queue_full"


def test_of_a_full_queue_a_quiet_caller_gets_its_share_and_no_more() -> None:
    """The newest of the loud one go, until both have as much; then the quiet one is refused as well."""
    queue = Queue(6, max_queued_requests=6)
    gone: list[int] = []
    for order in range(10, 20):
        answer = queue.admission.displaced(ticket(order, QUIET))
        if isinstance(answer, GenerationFailed):
            break
        for victim in answer:
            queue.queue.forget(victim.request_id)
            gone.append(victim.arrival_order)
        queue.queue.add(ticket(order, QUIET))
    assert gone == [5, 4, 3]
    assert queue.displaced_by(ticket(99, LOUD)) == "queue_full", "and the loud one does not get them back"
    assert queue.admission.full(QUIET) is not None


def test_weights_count_for_the_share() -> None:
    queue = Queue(6, max_queued_requests=6)
    heavy = Caller("heavy", weight=1000.0)
    num_admitted = 0
    while not isinstance(answer := queue.admission.displaced(ticket(10 + num_admitted, heavy)), GenerationFailed):
        for victim in answer:
            queue.queue.forget(victim.request_id)
        queue.queue.add(ticket(10 + num_admitted, heavy))
        num_admitted += 1
    assert num_admitted == 5, "all but the last one"


def test_tokens_are_bounded_as_well() -> None:
    queue = Queue(4, max_queued_tokens=40)
    assert queue.displaced_by(ticket(9, LOUD, cost=1)) == "queue_full"
    assert queue.displaced_by(ticket(9, QUIET, cost=15)) == [3, 2], "as many as it takes"
    assert queue.displaced_by(ticket(9, QUIET, cost=25)) == "queue_full", "that would be more than the loud one has"


def test_what_is_larger_than_the_queue_is_taken_when_nobody_waits() -> None:
    queue = Queue(0, max_queued_tokens=40)
    assert queue.displaced_by(ticket(9, cost=1000)) == []


def test_what_was_begun_already_keeps_its_place() -> None:
    """A resumed request has been promised to its client."""
    queue = Queue(2, max_queued_requests=2)
    queue.queue.add(queue.queue.take())
    assert queue.displaced_by(ticket(9, QUIET)) == "queue_full", "the loud one has one other, as the quiet one would"


def test_nothing_is_refused_by_prediction_before_a_rate_was_measured() -> None:
    queue = Queue(1000, rate=None)
    assert queue.admission.refusal(ticket(9999), ROOMY, timeout_s=0.1) is None
    assert queue.admission.wait_s(ticket(9999), ROOMY) is None


def test_who_would_wait_for_too_long_is_refused_until_half_of_it_is_over() -> None:
    queue = Queue(100, max_queue_wait_s=60.0)  # 1,000 tokens, 10 a second
    assert refused(queue.admission.refusal(ticket(999), ROOMY, NEVER)) == pytest.approx(50.0, rel=0.1)
    assert queue.admission.refusal(ticket(999, QUIET), ROOMY, NEVER) is None, "it would not wait at all"
    assert Queue(50, max_queue_wait_s=60.0).admission.refusal(ticket(999), ROOMY, NEVER) is None


def test_who_has_less_time_than_the_wait_is_refused_at_once() -> None:
    """It would be accepted to expire."""
    queue = Queue(10)  # 100 tokens, 10 a second
    assert queue.admission.refusal(ticket(999), ROOMY, timeout_s=15.0) is None
    refusal = queue.admission.refusal(ticket(999), ROOMY, timeout_s=5.0)
    assert refused(refusal) == pytest.approx(5.0, rel=0.1)
    assert "its own limit is 5 s" in str(refusal)


def test_blocks_that_are_freed_slowly_make_a_wait_as_well() -> None:
    queue = Queue(10, rate=1000.0)
    for second in range(101, 140):
        queue.admission.freed(2)
        queue.admission.drained(1000, float(second), is_waiting=True)
    wait_s = queue.admission.wait_s(ticket(999), BlockRoom(num_wanted=100, num_free=20, num_all=200))
    assert wait_s == pytest.approx(40.0, rel=0.1), "80 blocks that are not free, 2 a second"
    assert queue.admission.wait_s(ticket(999, QUIET), BlockRoom(100, 20, 200)) == pytest.approx(0.0, abs=0.01)


def test_nobody_is_refused_by_blocks_before_a_quarter_of_them_has_changed_hands() -> None:
    """Regression: of a burst of long answers the few short ones end first, which told nothing about the others."""
    queue, room = Queue(10, rate=1000.0), BlockRoom(num_wanted=1000, num_free=0, num_all=1000)
    queue.admission.freed(4)
    queue.admission.drained(1000, 101.0, is_waiting=True)
    assert queue.admission.refusal(ticket(999), room, timeout_s=60.0) is None
    for second in range(102, 170):
        queue.admission.freed(4)
        queue.admission.drained(1000, float(second), is_waiting=True)
    assert "would wait for about 250 s" in str(queue.admission.refusal(ticket(999), room, timeout_s=60.0))


@pytest.mark.parametrize(("rate", "expected"), [(1.0, MAX_RETRY_S), (10**6, MIN_RETRY_S)])
def test_nobody_is_told_to_come_back_too_soon_or_too_late(rate: float, expected: float) -> None:
    queue = Queue(100, rate=rate, max_queued_requests=100, cost=100)
    assert refused(queue.admission.full(LOUD)) == expected


def test_output_is_expected_as_it_was_of_late_and_never_above_what_was_asked() -> None:
    admission = Admission(AdmissionLimits(), FairQueue())

    def expected(max_tokens: int) -> int:
        request = GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=max_tokens))
        return admission.ticket(request, 0).num_output_tokens

    assert expected(5) == 5
    for _ in range(200):
        admission.answered(30)
    assert (expected(1000), expected(30), expected(4)) == (30, 30, 4)
