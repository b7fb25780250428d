"""No credit is lost or given twice, none goes to another transfer, and none waits while it matters."""

import random
from collections import Counter

from twinpool.kvtransfer.credits import JOINED_BYTES, HeldCredits
from twinpool.kvtransfer.frames import Credit


def credit(num_bytes: int, request_id: str = "r", attempt: int = 1, generation: int = 1) -> Credit:
    return Credit(request_id=request_id, attempt=attempt, generation=generation, num_bytes=num_bytes)


def test_small_credits_of_a_transfer_come_as_one() -> None:
    held = HeldCredits()
    assert [held.add(b"p", credit(1000)) for _ in range(5)] == [None] * 5
    assert held.take() == [(b"p", credit(5000))]
    assert held.take() == []


def test_a_large_credit_does_not_wait_and_takes_along_what_was_held() -> None:
    held = HeldCredits()
    assert held.add(b"p", credit(JOINED_BYTES)) == credit(JOINED_BYTES)
    assert held.add(b"p", credit(JOINED_BYTES - 1)) is None
    assert held.add(b"p", credit(7)) == credit(JOINED_BYTES + 6)
    assert held.take() == []


def test_every_transfer_of_every_peer_gets_exactly_its_own() -> None:
    """Random credits: what went out at once and what was held add up, for each peer, attempt and generation."""
    draws, held = random.Random(3), HeldCredits()
    given: Counter[tuple[bytes, str, int, int]] = Counter()
    sent: Counter[tuple[bytes, str, int, int]] = Counter()
    for _ in range(2000):
        peer = draws.choice([b"p", b"q"])
        one = credit(draws.randrange(JOINED_BYTES // 3), draws.choice("rs"), draws.choice([1, 2]), draws.choice([1, 2]))
        given[(peer, one.request_id, one.attempt, one.generation)] += one.num_bytes
        due = held.add(peer, one)
        out = [(peer, due)] if due is not None else held.take() if draws.random() < 0.1 else []
        for receiver, message in out:
            sent[(receiver, message.request_id, message.attempt, message.generation)] += message.num_bytes
    for receiver, message in held.take():
        assert message.num_bytes < JOINED_BYTES
        sent[(receiver, message.request_id, message.attempt, message.generation)] += message.num_bytes
    assert sent == given
