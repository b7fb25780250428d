"""Which request runs where: order, choice of pairs, limits, and what becomes of lost attempts."""

import random
from dataclasses import replace
from typing import Any

import pytest
from router_bench import D0, D1, LIMITS, P0, P1, Router, asked, cancels, failure, hello, reached, stages
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    Busy,
    Failed,
    GrantRequest,
    Handback,
    Load,
    PeerGone,
    Prefill,
    Renew,
    SampledToken,
    Tokens,
    Unknown,
)
from twinpool.router.admission import AdmissionLimits
from twinpool.router.dispatch import DispatchCounts
from twinpool.router.generation import Finished, GenerationFailed, TokensSent
from twinpool.router.placement import BUSY_PAUSE_S


def test_a_request_goes_to_a_pair_and_ends_once() -> None:
    router = Router()
    assert asked(router.submit("a")) == [("a", D0, 1)]
    ((worker, prefill),) = router.grant("a")
    assert (worker, type(prefill)) == (P0, Prefill)
    assert isinstance(prefill, Prefill)
    assert prefill.receiver_addresses == ("tcp://d",)
    router.first("a")
    router.tokens("a", 0, 2)
    router.tokens("a", 2, 1, finish_reason="stop")
    assert router.outputs("a") == [100, 101, 102]
    assert isinstance(router.end("a"), Finished)
    assert (router.core.num_running, router.core.num_queued) == (0, 0)
    assert router.tokens("a", 3, 1) == [], "too late"


def test_without_a_whole_pair_requests_are_refused_at_once() -> None:
    for prompts, completions in (((), ()), ((P0,), ()), ((), (D0,))):
        router = Router(prompts, completions)
        router.submit("a")
        assert failure(router.end("a")) == "no_worker"
        assert not router.core.is_complete
        assert router.core.max_model_len is None


def test_a_full_queue_refuses_and_forgets_nothing() -> None:
    router = Router(num_blocks=2)
    for number in range(7):
        router.submit(f"r{number}", length=3)  # one block each: the first runs, five wait
    assert [name for name in router.events] == ["r6"]  # noqa: C416
    assert failure(router.end("r6")) == "queue_full"
    assert "5 requests are waiting" in str(router.end("r6"))
    assert (router.core.num_running, router.core.num_queued) == (1, 5)


def test_requests_start_strictly_in_their_order() -> None:
    """A small one does not overtake a large one that has to wait: nobody starves."""
    router = Router(num_blocks=20)
    router.submit("first", length=55)  # 14 blocks
    assert asked(router.submit("large", length=39)) == []
    assert asked(router.submit("small", length=1)) == []
    router.grant("first", free=6)
    router.first("first", finish_reason="stop")
    sent = router.gets(D0, Tokens(sequences=(), num_free_blocks=20))
    assert [name for name, _, _ in asked([*router.sent[-3:], *sent])][:2] == ["large", "small"]


def test_a_resumed_request_is_served_before_younger_ones() -> None:
    router = Router(max_num_seqs=1)
    router.running("old")
    router.submit("young")
    sent = router.gets(D0, Handback(request_id="old", attempt=1, num_output_tokens=2, num_free_blocks=100))
    assert asked(sent) == [("old", D0, 2)]
    (request,) = [m for _, m in sent if isinstance(m, GrantRequest)]
    assert (request.num_output_tokens, request.token_ids[-2:], request.arrival_order) == (2, (100, 101), 0)
    assert cancels(sent) == [], "it gave its blocks up by itself"
    router.grant("old", attempt=2)
    router.first("old", attempt=2, position=2, token=SampledToken(token=102), finish_reason="length")
    assert router.outputs("old") == [100, 101, 102]
    end = router.end("old")
    assert isinstance(end, Finished)
    assert (end.timeline.num_preemptions, end.timeline.num_attempts) == (1, 1)
    assert asked(router.sent)[-1] == ("young", D0, 1)


def test_the_prompt_worker_with_the_least_predicted_wait_is_chosen() -> None:
    """Queued tokens over the observed rate: the faster of two equally loaded workers, until it has more to do."""
    router = Router((P0, P1))
    router.submit("a", length=40)
    router.grant("a")
    router.submit("b", length=40)
    assert router.grant("b")[0][0] == P1, "the other one is idle"
    router.first("b", P1, stages=stages(num_computed_tokens=40, prefill_s=0.004))  # 10,000 tokens/s
    router.first("a", P0, stages=stages(num_computed_tokens=40, prefill_s=4.0))  # 10 tokens/s
    targets: list[WorkerId] = []
    for name in "cdef":
        router.submit(name, length=20)
        targets.append(router.grant(name)[0][0])
    assert targets == [P0, P1, P1, P1], "empty and equal: the first by name; then by rate, 20/700 against 60/3700"


def test_a_prompt_worker_takes_two_steps_of_tokens_at_most() -> None:
    router = Router(max_num_batched_tokens=50)
    assert asked(router.submit("a", length=99))
    assert asked(router.submit("b", length=1)), "99 are fewer than 100"
    assert asked(router.submit("c", length=1)) == [], "100 are not"
    router.grant("a")
    sent = router.first("a")
    assert asked(sent) == [("c", D0, 1)]


def test_what_the_completion_worker_reports_first_clears_the_prompt_workers_backlog() -> None:
    router = Router(max_num_batched_tokens=50)
    router.submit("a", length=100)
    assert asked(router.submit("b", length=1)) == []
    router.grant("a")
    assert asked(router.tokens("a", 0, 2, stages={"since_last_kv_s": 0, "prefill": stages()})) == [("b", D0, 1)]


def test_the_completion_worker_with_the_fewest_sequences_is_chosen() -> None:
    router = Router(completions=(D0, D1))
    order = [asked(router.submit(name))[0][1] for name in "abcd"]
    assert order == [D0, D1, D0, D1]


def test_among_equals_the_one_with_more_free_blocks_is_chosen() -> None:
    router = Router(completions=(D0, D1))
    router.core.load_reported(D0, Load(num_blocks=100, num_free_blocks=50))
    assert asked(router.submit("a"))[0][1] == D1


@pytest.mark.parametrize("length", [35, 36])
def test_room_counts_unanswered_grants_and_a_block_for_each_sequence(length: int) -> None:
    """20 blocks: 9 are asked for, one is left for its growth, so 10 fit and 11 do not… by prompt plus one token."""
    router = Router(num_blocks=20)
    router.submit("a", length=35)  # 36 tokens with the first output: 9 blocks
    assert bool(asked(router.submit("b", length=length + 4))) == (length == 35)


def test_an_answered_grant_is_counted_by_the_worker_itself() -> None:
    router = Router(num_blocks=20)
    router.submit("a", length=35)
    router.grant("a", free=11)
    assert asked(router.submit("b", length=39)), "11 free, one kept for a, 10 needed"


def test_a_prompt_as_large_as_the_pool_runs_when_it_is_empty() -> None:
    router = Router(num_blocks=10)
    assert asked(router.submit("a", length=39))
    router = Router(num_blocks=10)
    router.submit("small")
    assert asked(router.submit("a", length=39)) == []


def test_what_an_empty_worker_cannot_hold_is_asked_for_all_the_same() -> None:
    """So that the answer is "too long" at once, and not a timeout."""
    assert asked(Router(num_blocks=10).submit("a", length=60))


def test_max_num_seqs_is_kept() -> None:
    router = Router(max_num_seqs=2, max_num_batched_tokens=1000)
    assert [bool(asked(router.submit(name))) for name in "abc"] == [True, True, False]


def test_busy_puts_the_request_back_and_pauses_that_worker() -> None:
    router = Router(completions=(D0, D1))
    router.submit("a")
    sent = router.gets(D0, Busy(request_id="a", attempt=1, num_free_blocks=100))
    assert asked(sent) == [("a", D1, 2)], "the other one is asked"
    assert asked(router.gets(D1, Busy(request_id="a", attempt=2, num_free_blocks=100))) == []
    assert router.core.num_queued == 1
    assert asked(router.tick(BUSY_PAUSE_S - 0.01)) == []
    assert asked(router.tick(BUSY_PAUSE_S)) == [("a", D0, 3)]
    router.grant("a", attempt=3)
    router.first("a", attempt=3, finish_reason="stop")
    end = router.end("a")
    assert isinstance(end, Finished)
    assert end.timeline.num_attempts == 1, "busy is no failure"


def test_what_went_otherwise_than_planned_is_counted() -> None:
    """For metrics: grants that were refused, attempts that were repeated, sequences that were handed back."""
    router = Router()
    router.submit("a")
    router.gets(D0, Busy(request_id="a", attempt=1, num_free_blocks=100))
    assert router.core.counts == DispatchCounts(num_busy=1)
    assert router.core.num_queued_tokens > 0
    assert asked(router.tick(BUSY_PAUSE_S)) == [("a", D0, 2)]
    assert router.core.num_queued_tokens == 0
    router.gets(D0, Failed(request_id="a", attempt=2, reason="boom"))
    router.grant("a", attempt=3)
    router.first("a", attempt=3)
    router.gets(D0, Handback(request_id="a", attempt=3, num_output_tokens=1, num_free_blocks=100))
    assert router.core.counts == DispatchCounts(num_busy=1, num_retries=1, num_preemptions=1)
    for attempt in (4, 5):
        router.gets(D0, Failed(request_id="a", attempt=attempt, reason="boom"))
    assert isinstance(router.end("a"), GenerationFailed)
    assert router.core.counts.num_retries == 2, "the last failure is not followed by another attempt"


def test_answers_of_another_attempt_or_phase_mean_nothing() -> None:
    router = Router()
    router.submit("a")
    assert router.grant("a", attempt=2) == []
    assert router.grant("unknown") == []
    router.grant("a")
    assert router.grant("a") == []
    assert router.gets(D0, Busy(request_id="a", attempt=1, num_free_blocks=9)) == []
    assert router.core.num_running == 1
    router.first("a", attempt=7)
    assert router.outputs("a") == []


@pytest.mark.parametrize(
    ("reach", "worker", "expected"),
    [
        ("granting", D0, [("a", D0, False)]),
        ("prefilling", P0, [("a", P0, False), ("a", D0, True)]),
        ("prefilling", D0, [("a", P0, False), ("a", D0, True)]),
        ("running", D0, [("a", D0, False)]),
    ],
)
def test_a_failed_attempt_is_stopped_everywhere_and_tried_again(
    reach: str, worker: WorkerId, expected: list[tuple[str, WorkerId, bool]]
) -> None:
    router = Router()
    reached(router, reach)
    sent = router.gets(worker, Failed(request_id="a", attempt=1, reason="boom"))
    assert cancels(sent) == expected
    assert asked(sent) == [("a", D0, 2)]
    assert router.end("a") is None


def test_a_failure_of_one_that_does_not_hold_the_request_means_nothing() -> None:
    """The PROMPT worker's transfer may fail after the COMPLETION worker has all it needs."""
    router = Router()
    router.running("a")
    assert router.gets(P0, Failed(request_id="a", attempt=1, reason="late")) == []
    assert router.gets(P0, Unknown(requests=(("a", 1),))) == []


@pytest.mark.parametrize(("is_too_long", "code"), [(True, "too_long"), (False, "grammar_failed")])
def test_a_request_that_no_worker_can_serve_fails_at_once(is_too_long: bool, code: str) -> None:
    """Regression: a grammar that broke was told as a prompt that is too long."""
    router = Router()
    router.submit("a")
    failed = Failed(request_id="a", attempt=1, reason="it is so", is_retryable=False, is_too_long=is_too_long)
    sent = router.gets(D0, failed)
    assert failure(router.end("a")) == code
    assert "it is so" in str(router.end("a"))
    assert asked(sent) == []


def test_a_request_that_fails_too_often_fails() -> None:
    router = Router()
    router.submit("a")
    for attempt in (1, 2):
        router.gets(D0, Failed(request_id="a", attempt=attempt, reason="boom"))
        assert router.end("a") is None
    sent = router.gets(D0, Failed(request_id="a", attempt=3, reason="boom"))
    assert failure(router.end("a")) == "worker_failed"
    assert cancels(sent) == [("a", D0, False)]


def test_a_holder_that_does_not_know_the_request_has_lost_it() -> None:
    router = Router()
    router.running("a")
    sent = router.gets(D0, Unknown(requests=(("other", 1), ("a", 2), ("a", 1))))
    assert asked(sent) == [("a", D0, 2)]
    assert asked(router.gets(D0, Unknown(requests=(("a", 1),)))) == [], "of an old attempt"


def test_tokens_that_were_lost_on_the_way_make_a_new_attempt() -> None:
    router = Router()
    router.running("a")
    sent = router.tokens("a", 4, 1)
    assert cancels(sent) == [("a", D0, False)]
    assert asked(sent) == [("a", D0, 2)]
    assert router.outputs("a") == [100, 101]


@pytest.mark.parametrize("number", [0, 1])
def test_an_end_without_a_beginning_makes_a_new_attempt(number: int) -> None:
    """Regression: a report that ends a request whose first token nobody has told ended the router instead."""
    router = Router()
    reached(router, "prefilling")
    assert asked(router.tokens("a", 0, number, finish_reason="stop")) == [("a", D0, 2)]
    assert router.end("a") is None


@pytest.mark.parametrize(
    ("reach", "dead", "expected"),
    [
        ("granting", D0, []),
        ("prefilling", D0, [("a", P0, False)]),
        ("prefilling", P0, []),
        ("running", D0, []),
    ],
)
def test_what_ran_on_a_dead_worker_moves(
    reach: str, dead: WorkerId, expected: list[tuple[str, WorkerId, bool]]
) -> None:
    router = Router()
    reached(router, reach)
    router.do(router.core.worker_joined(P1, hello("PROMPT"), 0.0))
    router.do(router.core.worker_joined(D1, hello("COMPLETION"), 0.0))
    sent = router.do(router.core.worker_gone(dead, 1.0))
    assert cancels(sent) == expected
    ((name, worker, attempt),) = asked(sent)
    assert (name, attempt, worker) == ("a", 2, D1 if dead == D0 else D0), "what D0 has of the KV is of use there only"
    told = [worker for worker, message in sent if message == PeerGone(worker=str(dead))]
    assert told == ([P0, P1] if dead == D0 else [])


def test_the_death_of_a_prompt_worker_that_is_done_disturbs_nobody() -> None:
    router = Router((P0, P1))
    router.running("a")
    assert router.do(router.core.worker_gone(P0, 1.0)) == []
    router.tokens("a", 2, 1, finish_reason="stop")
    assert isinstance(router.end("a"), Finished)


def test_the_death_of_a_prompt_worker_that_may_be_sending_is_a_lost_attempt() -> None:
    router = Router((P0, P1))
    router.submit("a")
    router.grant("a")
    router.first("a")
    assert asked(router.do(router.core.worker_gone(P0, 1.0))) == [("a", D0, 2)]


def test_accepted_requests_wait_for_an_empty_pool_and_then_fail() -> None:
    router = Router()
    router.submit("a")
    router.do(router.core.worker_gone(D0, 5.0))
    router.tick(14.9)
    assert router.end("a") is None
    router.tick(15.0)
    assert failure(router.end("a")) == "no_worker"


def test_the_second_pool_that_empties_does_not_lengthen_the_wait() -> None:
    router = Router()
    router.submit("a")
    router.do(router.core.worker_gone(D0, 5.0))
    router.do(router.core.worker_gone(P0, 9.0))
    router.tick(15.0)
    assert failure(router.end("a")) == "no_worker"


def test_late_reports_about_a_queued_request_change_nothing() -> None:
    """It waits for a pair; its old attempt's tokens would otherwise lose it a second time."""
    router = Router()
    router.submit("a")
    router.grant("a")
    router.do(router.core.worker_gone(P0, 1.0))
    assert router.core.num_queued == 1
    assert router.tokens("a", 5, 1) == []
    assert router.tokens("a", 0, 0, finish_reason="stop") == []
    assert (router.core.num_queued, router.end("a")) == (1, None)


def test_a_worker_that_comes_in_time_serves_those_who_wait() -> None:
    router = Router()
    router.submit("a")
    router.do(router.core.worker_gone(D0, 5.0))
    router.do(router.core.worker_gone(P0, 9.0))  # the pool was incomplete already: the time runs from 5
    sent = router.do(router.core.worker_joined(D1, hello("COMPLETION"), 12.0))
    sent += router.do(router.core.worker_joined(P1, hello("PROMPT"), 14.0))
    assert asked(sent) == [("a", D1, 2)]
    router.tick(15.5)
    assert router.end("a") is None


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        ("granting", [("a", D0, False)]),
        ("prefilling", [("a", P0, False), ("a", D0, True)]),
        ("running", [("a", D0, False)]),
    ],
)
def test_a_request_past_its_deadline_is_stopped_and_fails(reach: str, expected: list[Any]) -> None:
    router = Router(limits=replace(LIMITS, answer_s=1000.0))
    reached(router, reach)
    assert cancels(router.tick(59.9)) == []
    assert cancels(router.tick(60.0)) == expected
    assert failure(router.end("a")) == "timeout"


def test_a_queued_request_past_its_deadline_fails_too() -> None:
    router = Router(max_num_seqs=1)
    router.running("a")
    router.submit("b")
    router.tick(60.0)
    assert failure(router.end("b")) == "timeout"
    assert router.core.num_queued == 0


def test_a_grant_that_is_never_answered_is_a_lost_attempt() -> None:
    """I6: asking has a deadline as well."""
    router = Router(completions=(D0, D1))
    router.submit("a")
    assert asked(router.tick(4.9)) == []
    sent = router.tick(5.0)
    assert cancels(sent) == [("a", D0, False)], "a late grant must not stay"
    assert asked(sent) == [("a", D1, 2)], "among equals it is another one's turn"
    assert router.grant("a", attempt=1) == []


def test_renewals_name_exactly_the_holders() -> None:
    """P only while it prefills; D in every phase, as prefilled once the first token is known; nobody else."""
    router = Router((P0,), (D0, D1), max_num_seqs=2)
    for name, worker in (("decoding", D0), ("prefilling", D1), ("granting", D0)):
        assert asked(router.submit(name)) == [(name, worker, 1)]
    router.grant("decoding", D0)
    router.first("decoding")
    router.grant("prefilling", D1)
    router.running("ended")
    router.tokens("ended", 2, 1, D1, finish_reason="stop")
    assert {worker: message for worker, message in router.tick(1.0) if isinstance(message, Renew)} == {
        P0: Renew(requests=(("prefilling", 1),)),
        D0: Renew(requests=(("granting", 1),), prefilled=(("decoding", 1),)),
        D1: Renew(requests=(("prefilling", 1),)),
    }


def test_renewals_come_every_second_and_only_then() -> None:
    router = Router()
    router.running("a")
    times = [tenth / 10 for tenth in range(1, 40) if any(isinstance(m, Renew) for _, m in router.tick(tenth / 10))]
    assert times == [1.0, 2.0, 3.0]


def test_many_requests_are_renewed_in_messages_of_bounded_size() -> None:
    router = Router(
        limits=replace(LIMITS, admission=AdmissionLimits(max_queued_requests=5000)),
        max_num_seqs=1024,
        num_blocks=10_000,
        max_num_batched_tokens=10_000,
    )
    for number in range(700):
        router.submit(f"r{number}", length=1)
    renewals = [m for _, m in router.tick(1.0) if isinstance(m, Renew)]
    assert [len(m.requests) for m in renewals] == [512, 188]


def test_a_client_that_leaves_makes_room_for_the_next() -> None:
    router = Router(max_num_seqs=1)
    router.running("a")
    router.submit("b")
    sent = router.do(router.core.cancel("a", 1.0))
    assert cancels(sent) == [("a", D0, False)]
    assert asked(sent) == [("b", D0, 1)]
    assert router.end("a") is None, "there is nobody to tell"
    assert router.do(router.core.cancel("a", 1.0)) == []
    assert router.tokens("a", 2, 1) == []


def test_a_reader_that_has_enough_makes_room_for_the_next_and_is_told() -> None:
    router = Router(max_num_seqs=1)
    router.running("a")
    router.submit("b")
    sent = router.do(router.core.finish("a", 1.0))
    assert cancels(sent) == [("a", D0, False)]
    assert asked(sent) == [("b", D0, 1)]
    assert isinstance(router.end("a"), Finished)
    assert router.do(router.core.finish("a", 1.0)) == []


def test_a_queued_client_that_leaves_is_forgotten() -> None:
    router = Router(max_num_seqs=1)
    router.running("a")
    router.submit("b")
    assert router.do(router.core.cancel("b", 1.0)) == []
    assert (router.core.num_queued, router.core.num_running) == (0, 1)


def test_a_client_that_leaves_while_its_sequence_waits_to_be_resumed_leaves_nothing() -> None:
    """Its COMPLETION worker gave the blocks up: there is nobody to stop, and nothing may keep its place."""
    router = Router(max_num_seqs=1)
    router.running("a")
    assert router.gets(D0, Handback(request_id="a", attempt=1, num_output_tokens=2, num_free_blocks=0)) == []
    assert (router.core.num_queued, router.core.num_running) == (1, 0)
    assert router.do(router.core.cancel("a", 1.0)) == []
    assert (router.core.num_queued, router.core.num_queued_tokens, router.core.num_running) == (0, 0, 0)
    router.core.load_reported(D0, Load(num_blocks=100, num_free_blocks=100))
    assert asked(router.submit("b")) == [("b", D0, 1)], "the only place is free"


def test_the_context_is_what_every_worker_can_hold() -> None:
    router = Router(num_blocks=100)
    assert router.core.max_model_len == 400
    router.do(router.core.worker_joined(P1, hello("PROMPT", max_model_len=300), 0.0))
    assert router.core.max_model_len == 300
    router.do(router.core.worker_joined(D1, hello("COMPLETION", num_blocks=20), 0.0))
    assert router.core.max_model_len == 80


@pytest.mark.parametrize("seed", range(40))
def test_random_messages_never_break_it(seed: int) -> None:
    """Any message about any request and attempt, from any worker, with deaths, joins, cancels and time.

    Each request gets consecutive tokens and at most one terminal event (checked by `do`), and all end in bounded time.
    """
    rng = random.Random(seed)
    router = Router(
        (P0, P1), (D0, D1), limits=replace(LIMITS, admission=AdmissionLimits(max_queued_requests=100)), num_blocks=30
    )
    names = [f"r{number}" for number in range(12)]
    left: set[str] = set()
    waiting = list(names)
    for _ in range(400):
        name, attempt = rng.choice(names), rng.randrange(1, 4)
        worker = rng.choice([P0, P1, D0, D1])
        match rng.randrange(12):
            case 0 if waiting:
                router.submit(waiting.pop(), length=rng.randrange(1, 60))
            case 1 | 2 | 3:
                router.grant(name, rng.choice([D0, D1]), attempt, free=rng.randrange(31))
            case 4:
                router.gets(worker, Busy(request_id=name, attempt=attempt, num_free_blocks=rng.randrange(31)))
            case 5 | 6:
                known = len(router.outputs(name))
                router.first(name, rng.choice([P0, P1]), attempt, position=rng.randrange(known + 1))
            case 7 | 8 if router.outputs(name):
                known = len(router.outputs(name))
                reason = rng.choice([None, None, "stop"])
                router.tokens(
                    name, rng.randrange(known + 2), rng.randrange(1, 4), worker, attempt, finish_reason=reason
                )
            case 9:
                router.gets(worker, Handback(request_id=name, attempt=attempt, num_output_tokens=1, num_free_blocks=9))
                router.gets(worker, Unknown(requests=((name, attempt),)))
            case 10:
                if rng.random() < 0.3:
                    router.do(router.core.worker_gone(worker, router.now))
                    role = "PROMPT" if worker.name.startswith("prompt") else "COMPLETION"
                    router.do(router.core.worker_joined(worker, hello(role, num_blocks=30), router.now))
                elif rng.random() < 0.2 and name not in waiting:
                    router.do(router.core.cancel(name, router.now))
                    left.add(name)
            case _:
                router.tick(router.now + rng.random() * 0.5)
    for event in (e for events in router.events.values() for e in events):
        assert isinstance(event, TokensSent | Finished | GenerationFailed)
    for name, events in router.events.items():
        sent = [e for e in events if isinstance(e, TokensSent)]
        assert all(e.position == sum(len(before.tokens) for before in sent[:i]) for i, e in enumerate(sent)), name
    router.tick(router.now + 61.0)
    assert (router.core.num_queued, router.core.num_running) == (0, 0)
    assert all(router.end(name) is not None for name in set(names) - set(waiting) - left)
