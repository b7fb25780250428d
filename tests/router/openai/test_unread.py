"""What a request's reader has not taken is bounded, and the reader is told."""

import asyncio

from twinpool.cluster.protocol.messages import SampledToken
from twinpool.router.generation import GenerationFailed
from twinpool.router.openai.choice import Piece
from twinpool.router.openai.unread import Unread, num_entries_of

WIDE = SampledToken(token=1, logprob=-1.0, top=((1, -1.0), (2, -2.0)))
PIECES = [Piece(0, str(number)) for number in range(3)]


def test_items_come_in_order_and_what_was_taken_makes_room() -> None:
    """Alternatives count as much as tokens; what counts nothing always fits."""

    async def run() -> None:
        unread = Unread(max_entries=6)
        for _ in range(10):
            assert all(unread.put(piece, num_entries_of([WIDE])) for piece in PIECES[:2])
            assert [await unread.next(1.0), await unread.next(1.0)] == PIECES[:2]
        assert all(unread.put(PIECES[0], num_entries_of([WIDE])) for _ in range(2))
        assert unread.put(GenerationFailed("timeout", "late"))

    asyncio.run(run())


def test_what_is_too_much_becomes_one_failure() -> None:
    async def run() -> None:
        unread = Unread(max_entries=6)
        assert [unread.put(piece, num_entries_of([WIDE])) for piece in PIECES] == [True, True, False]
        failure = await unread.next(1.0)
        assert isinstance(failure, GenerationFailed)
        assert failure.code == "slow_reader"
        assert await unread.next(0.001) is None

    asyncio.run(run())


def test_a_whole_answer_has_no_bound() -> None:
    unread = Unread(max_entries=None)
    assert all(unread.put(piece, 10**9) for piece in PIECES)


def test_a_waiting_reader_is_woken() -> None:
    async def run() -> None:
        unread = Unread()
        reader = asyncio.create_task(unread.next())
        await asyncio.sleep(0)
        unread.put(PIECES[0], 1)
        unread.wake()
        assert await asyncio.wait_for(reader, 10) == PIECES[0]
        unread.wake()  # nobody waits

    asyncio.run(run())
