"""A PROMPT worker dies: what the COMPLETION worker has of the KV is kept for the next attempt, or given back."""

from typing import Any

import pytest
from router_bench import D0, D1, P0, P1, Router, asked, cancels, failure, hello, reached, stages
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    Failed,
    Granted,
    GrantRequest,
    Message,
    Prefill,
    Renew,
    SampledToken,
    Tokens,
    Unknown,
)
from twinpool.router.generation import Finished


def resumed(sent: list[tuple[WorkerId, Message]]) -> list[tuple[WorkerId, int, int]]:
    """Return whom was asked for a grant, for which attempt, going on from which."""
    return [(worker, m.attempt, m.resumed_attempt) for worker, m in sent if isinstance(m, GrantRequest)]


def lost(*prompts: WorkerId, completions: tuple[WorkerId, ...] = (D0,)) -> Router:
    """A request whose only PROMPT worker died while it computed; nobody else can take it now."""
    router = Router(prompts or (P0,), completions)
    router.submit("a")
    router.grant("a")
    assert router.do(router.core.worker_gone(P0, 1.0)) == []
    return router


def joins(router: Router, worker: WorkerId = P1, role: str = "PROMPT") -> list[tuple[WorkerId, Message]]:
    return router.do(router.core.worker_joined(worker, hello(role), 2.0))


def test_the_next_attempt_goes_on_where_the_lost_one_stopped() -> None:
    """The grant is asked of the same COMPLETION worker, and the new PROMPT worker sends only what is missing."""
    router = lost()
    assert resumed(joins(router)) == [(D0, 2, 1)]
    granted = Granted(
        request_id="a", attempt=2, generation=6, credit_bytes=9, arrived_tokens=(3, 2), num_free_blocks=90
    )
    ((worker, prefill),) = router.gets(D0, granted)
    assert isinstance(prefill, Prefill)
    assert (worker, prefill.arrived_tokens, prefill.generation) == (P1, (3, 2), 6)
    router.first("a", P1, attempt=2)
    router.tokens("a", 1, 1, attempt=2, finish_reason="stop")
    assert isinstance(router.end("a"), Finished)


def test_it_goes_on_there_although_others_have_more_room() -> None:
    router = lost(completions=(D0, D1))
    router.gets(D0, Tokens(sequences=(), num_free_blocks=0))
    assert resumed(joins(router)) == [(D0, 2, 1)]


def test_what_is_kept_is_renewed_while_the_request_waits() -> None:
    router = lost()
    assert router.tick(2.0) == [(D0, Renew(requests=(("a", 1),)))]


@pytest.mark.parametrize("what", ["suspect", "gone", "expired", "unknown"])
def test_without_what_was_kept_it_begins_anew(what: str) -> None:
    router = lost(completions=(D0, D1))
    match what:
        case "suspect":
            router.core.suspects = frozenset({D0})
        case "gone":
            assert router.do(router.core.worker_gone(D0, 1.5)) == [], "no PROMPT worker is left to be told"
        case "expired":
            assert router.gets(D0, Failed(request_id="a", attempt=1, reason="no KV for 5 s")) == []
        case _:
            assert router.gets(D0, Unknown(requests=(("a", 1),))) == []
    sent = joins(router)
    ((worker, attempt, resumed_attempt),) = resumed(sent)
    assert (attempt, resumed_attempt) == (2, 0)
    assert worker == D1 or what in ("expired", "unknown")
    assert cancels(sent) == ([("a", D0, False)] if what == "suspect" else []), "kept blocks are given back"
    assert router.core.counts.num_retries == 1, "the loss of what was kept is no second failure"


@pytest.mark.parametrize("how", ["leaves", "times out", "has enough"])
def test_a_request_that_ends_while_it_waits_gives_back_what_was_kept(how: str) -> None:
    router = Router((P0,))
    router.submit("a")
    router.grant("a")
    router.first("a")
    assert router.do(router.core.worker_gone(P0, 1.0)) == []
    match how:
        case "leaves":
            sent = router.do(router.core.cancel("a", 2.0))
        case "times out":
            sent = router.tick(60.0)
        case _:
            sent = router.do(router.core.finish("a", 2.0))
    assert cancels(sent) == [("a", D0, False)]
    assert router.tick(70.0) == [], "nothing is renewed"


def test_a_prompt_worker_that_dies_before_its_grant_comes_is_not_sent_the_prompt() -> None:
    """Regression: the prompt went to the dead one, and nobody missed it until the request's deadline."""
    router = Router((P0, P1))
    router.submit("a")
    assert asked(router.do(router.core.worker_gone(P0, 1.0))) == []
    sent = router.grant("a")
    assert not [m for _, m in sent if isinstance(m, Prefill)]
    assert resumed(sent) == [(D0, 2, 0)]
    assert cancels(sent) == [("a", D0, False)]


def test_what_completed_at_the_last_moment_is_not_kept() -> None:
    """The COMPLETION worker has reported a token, so it has all of the KV; the PROMPT worker's death loses nothing."""
    router = Router((P0,))
    router.running("a")
    assert router.do(router.core.worker_gone(P0, 1.0)) == []
    assert resumed(joins(router)) == []


def failed_transfer(**fields: Any) -> Failed:
    return Failed(request_id="a", attempt=1, reason="the connection broke", **fields)


def test_a_transfer_that_fails_behind_the_first_token_is_a_lost_attempt_at_once() -> None:
    """Regression: only the receiver's lease ended it, five seconds later."""
    router = Router((P0, P1))
    router.submit("a")
    router.grant("a")
    router.first("a")
    sent = router.gets(P0, failed_transfer())
    assert asked(sent) == [("a", D0, 2)]
    assert ("a", D0, True) in cancels(sent)


def test_a_transfer_that_fails_when_the_second_token_is_known_means_nothing() -> None:
    router = Router((P0, P1))
    router.running("a")
    assert router.gets(P0, failed_transfer()) == []


@pytest.mark.parametrize(
    ("prompts", "completions", "expected"),
    [((P0,), (D0, D1), (P0, D1)), ((P0, P1), (D0,), (P1, D0)), ((P0,), (D0,), (P0, D0))],
)
def test_an_attempt_that_failed_on_a_pair_is_not_given_to_the_same_pair_again(
    prompts: tuple[WorkerId, ...], completions: tuple[WorkerId, ...], expected: tuple[WorkerId, WorkerId]
) -> None:
    """The two may not reach each other, though the router reaches both. Where there is no other pair it is tried."""
    router = Router(prompts, completions)
    router.submit("a")
    router.grant("a")
    if len(prompts) + len(completions) > 2:
        router.running("b")  # on the other pair, which is busier from now on, and was chosen last
    sent = router.gets(P0, failed_transfer())
    ((_, completion, _),) = asked(sent)
    ((prompt, _),) = router.grant("a", completion, attempt=2)
    assert (prompt, completion) == expected


def test_a_request_fails_when_its_prompt_workers_die_again_and_again() -> None:
    router = Router((P0, P1))
    reached(router, "prefilling")
    for attempt, dead in enumerate((P0, P1), start=2):
        router.do(router.core.worker_gone(dead, 1.0))
        joins(router, WorkerId(dead.name, f"life-{attempt}"))
        router.grant("a", attempt=attempt)
    third = next(worker for worker, m in reversed(router.sent) if isinstance(m, Prefill))
    sent = router.do(router.core.worker_gone(third, 2.0))
    assert failure(router.end("a")) == "worker_failed"
    assert cancels(sent) == [("a", D0, False)]


def test_outputs_that_came_since_are_part_of_what_is_asked_for() -> None:
    router = Router((P0,))
    router.submit("a", length=3)
    router.grant("a")
    router.first("a", token=SampledToken(token=100), stages=stages())
    router.do(router.core.worker_gone(P0, 1.0))
    ((_, grant),) = [(w, m) for w, m in joins(router) if isinstance(m, GrantRequest)]
    assert (grant.resumed_attempt, grant.num_output_tokens, grant.token_ids) == (1, 1, (0, 1, 2, 100))
