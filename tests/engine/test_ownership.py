"""Each router hears of its own requests, and takes nothing else along when it goes."""

from collections.abc import Collection

import pytest
from twinpool.cluster.protocol.messages import (
    Busy,
    Cancel,
    Failed,
    GrantRequest,
    Heartbeat,
    Load,
    Message,
    PassesTimed,
    Prefill,
    Renew,
    SampledToken,
    SamplingParams,
    SequenceTokens,
    TimePasses,
    TimeTransfer,
    Tokens,
    TransferTimed,
)
from twinpool.engine.ownership import NUM_FORGOTTEN, Orphaned, Ownership

SAMPLING = SamplingParams(max_tokens=5)


def grant(request_id: str) -> GrantRequest:
    return GrantRequest(request_id=request_id, attempt=1, arrival_order=0, sampling=SAMPLING, token_ids=(1,))


def tokens(*request_ids: str) -> Tokens:
    sampled = (SampledToken(token=1),)
    sequences = tuple(SequenceTokens(request_id=name, attempt=1, position=0, tokens=sampled) for name in request_ids)
    return Tokens(sequences=sequences, num_free_blocks=7)


def owned(**owners: int) -> Ownership:
    ownership = Ownership()
    for request_id, router in owners.items():
        ownership.note(grant(request_id), router)
    return ownership


@pytest.mark.parametrize(
    ("order", "answer"),
    [
        (grant("r"), Busy(request_id="r", attempt=1, num_free_blocks=0)),
        (
            Prefill(
                request_id="r",
                attempt=1,
                sampling=SAMPLING,
                generation=1,
                credit_bytes=1,
                receiver="c/1",
                receiver_addresses=(),
            ),
            Failed(request_id="r", attempt=1, reason="x"),
        ),
        (
            TimePasses(probe_id="p", rows=((0, 1),), num_warmup=0, num_repeats=1, limit_s=1),
            PassesTimed(probe_id="p", pass_s=(1.0,)),
        ),
        (
            TimeTransfer(
                probe_id="p", num_tokens=1, generation=1, credit_bytes=1, receiver="c/1", receiver_addresses=()
            ),
            TransferTimed(probe_id="p", transfer_s=1.0),
        ),
    ],
)
def test_an_answer_goes_to_whoever_asked(order: Message, answer: Message) -> None:
    ownership = Ownership()
    ownership.note(order, 3)
    assert ownership.addressed(answer) == [(3, answer)]
    assert ownership.num_ownerless == 0


def test_a_step_s_tokens_are_split_among_their_routers() -> None:
    ownership = owned(a=0, b=1, c=0)
    assert ownership.addressed(tokens("a", "b", "c")) == [(0, tokens("a", "c")), (1, tokens("b"))]


def test_a_step_of_one_router_is_sent_as_it_is() -> None:
    message = tokens("a", "c")
    ((router, sent),) = owned(a=1, b=0, c=1).addressed(message)
    assert router == 1
    assert sent is message


def test_what_nobody_owns_is_dropped_and_counted() -> None:
    ownership = owned(a=0)
    assert ownership.addressed(Busy(request_id="x", attempt=1, num_free_blocks=0)) == []
    assert ownership.addressed(tokens("x", "a", "y")) == [(0, tokens("a"))]
    assert ownership.addressed(tokens("x")) == []
    assert ownership.num_ownerless == 4


def test_a_router_that_goes_takes_its_own_along_and_nothing_else() -> None:
    ownership = owned(a=0, b=1, c=0)
    assert ownership.orphan(0) == Orphaned(frozenset({"a", "c"}))
    assert ownership.orphan(0) == Orphaned(frozenset())
    assert ownership.addressed(tokens("a", "b")) == [(1, tokens("b"))]
    ownership.note(grant("a"), 1)
    assert ownership.addressed(tokens("a")) == [(1, tokens("a"))], "an id that is free may be anyone's"


def test_what_is_no_order_gives_nobody_anything() -> None:
    """A Renew or a Cancel of what is not here must not make an entry that nothing ever removes."""
    ownership = Ownership()
    for message in (Renew(requests=(("r", 1),)), Cancel(request_id="r", attempt=1)):
        ownership.note(message, 0)
    assert len(ownership) == 0


def test_a_message_without_a_request_is_not_for_this_table() -> None:
    beat = Heartbeat(progress=1, is_busy=False, load=Load(num_blocks=1, num_free_blocks=1))
    with pytest.raises(AssertionError, match="Heartbeat is not about a request"):
        Ownership().addressed(beat)


def test_the_table_is_bounded_by_what_is_held() -> None:
    """I8: a hundred thousand requests, forty at a time; what is held keeps its owner, and few looks are needed."""
    ownership, first, running = Ownership(), grant("r"), list[str]()
    num_looks = most = 0

    def held() -> Collection[str]:
        nonlocal num_looks
        num_looks += 1
        return set(running)

    for number in range(100_000):
        running = [*running[-39:], f"r{number}"]
        ownership.note(first.model_copy(update={"request_id": f"r{number}"}), number % 2)
        ownership.prune(held)
        most = max(most, len(ownership))
    assert most <= 2 * 40 + NUM_FORGOTTEN + 1
    assert num_looks <= 100_000 / NUM_FORGOTTEN + 1
    assert ownership.addressed(tokens("r99960", "r99999")) == [(0, tokens("r99960")), (1, tokens("r99999"))]
