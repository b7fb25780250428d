"""What every data channel owes the workers, whatever the bytes travel by: one suite for all kinds of channel."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from channel_kinds import KINDS, Channel, Kind, make_channel
from completion_side import CompletionSide
from prompt_side import LIMITS, ROW, VOCAB, Connect, PromptSide
from twinpool.cluster.protocol.messages import Message
from twinpool.engine.fake import FAKE_LAYOUT, FakeEngine, expected_tokens
from twinpool.kvtransfer.channel import SenderEnd
from twinpool.kvtransfer.frames import Cancelled, Credit, KVFrame, Received, checksum
from twinpool.kvtransfer.receiver import Receiver
from twinpool.kvtransfer.sender import Closed, Key, SenderLimits

PROMPT = [7, 1, 250, 3, 3, 9, 0, 44, 81, 5, 2, 6, 19]
KEY: Key = ("r", 1)
SIZES = [1, 10, 65_535, 65_536, 300_000, 4 << 20, 17]
Context = zmq.Context[zmq.Socket[bytes]]

pytestmark = pytest.mark.parametrize("kind", KINDS)


def kv_frame(number: int, payload: bytes) -> KVFrame:
    return KVFrame(
        request_id="r",
        attempt=1,
        generation=3,
        layout=1,
        sequence=number,
        layer_start=0,
        layer_end=1,
        token_start=0,
        token_end=1,
        num_bytes=len(payload),
        checksum=checksum(payload),
    )


def cancelled(number: int) -> Cancelled:
    return Cancelled(request_id=f"c{number}", attempt=1, generation=3)


class Driven:
    """A sender and the receiver in one thread: both are given time until the receiver has something."""

    def __init__(self, channel: Channel, sender: SenderEnd) -> None:
        self.receiver, self._sender = channel.receiver, sender
        self.replies: list[Message] = []

    def next_received(self, within_s: float = 10.0) -> Received:
        deadline_s = time.monotonic() + within_s
        while (received := self.receiver.receive()) is None:
            assert time.monotonic() < deadline_s, "nothing came"
            self.take_replies()
        return received

    def take_replies(self) -> list[Message]:
        sources = [*self.receiver.sources, *self._sender.sources]
        zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], 20)
        while (reply := self._sender.receive()) is not None:
            self.replies.append(reply)
        return self.replies


@pytest.fixture
def driven(kind: Kind, context: Context, socket_folder: Path) -> Iterator[tuple[SenderEnd, Driven]]:
    channel = make_channel(kind, context, socket_folder, max_frame_bytes=4 << 20)
    with closing(channel.receiver), closing(channel.open_sender()) as sender:
        yield sender, Driven(channel, sender)


def test_frames_of_all_sizes_and_what_is_between_arrive_in_order(driven: tuple[SenderEnd, Driven]) -> None:
    sender, both = driven
    payloads = [bytes([number]) * size for number, size in enumerate(SIZES)]
    for number, payload in enumerate(payloads):
        sender.send(kv_frame(number, payload), memoryview(payload))
        sender.send(cancelled(number))
    for number, payload in enumerate(payloads):
        frame, other = both.next_received(), both.next_received()
        assert isinstance(frame.message, KVFrame)
        assert (frame.message.sequence, frame.message.num_bytes) == (number, len(payload))
        assert bytes(frame.payload) == payload
        assert frame.is_intact
        assert (other.message, other.payload.nbytes, other.is_intact) == (cancelled(number), 0, False)
        assert frame.peer == other.peer


def test_answers_go_to_who_was_answered(driven: tuple[SenderEnd, Driven]) -> None:
    sender, both = driven
    sender.send(cancelled(0))
    peer = both.next_received().peer
    replies = [Credit(request_id="r", attempt=1, generation=3, num_bytes=number) for number in range(20)]
    for reply in replies:
        both.receiver.reply(b"nobody", reply)
        both.receiver.reply(peer, reply)
    deadline_s = time.monotonic() + 10
    while len(both.take_replies()) < 20:
        assert time.monotonic() < deadline_s, both.replies
    assert both.replies == replies


@pytest.mark.parametrize("chunk", [3, 5, 100])
def test_the_tokens_continue_on_the_other_side(connect: Connect, completion_side: CompletionSide, chunk: int) -> None:
    """From blocks of 4 to blocks of 5, in another order: the answer is that of one engine."""
    prompt_side = connect()
    completion_side.grant(KEY, 3, len(PROMPT), [9, 2, 7, 11])
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3, chunk)
    completion_side.work(KEY)
    assert prompt_side.next_end() == Closed(KEY, "acked", "")
    assert completion_side.continue_there(KEY, PROMPT, 6) == expected_tokens(PROMPT, 6, VOCAB)
    assert completion_side.core.num_dropped_frames == 0


def test_many_transfers_of_two_peers_at_once(connect: Connect, completion_side: CompletionSide) -> None:
    """Each peer's share one connection; frames of all are mixed, and each answer is right."""
    completion_side.engine = FakeEngine(100, 5, VOCAB)
    sides = [connect(engine=FakeEngine(60, 4, VOCAB)) for _ in range(2)]
    for number in range(24):
        key, prompt, generation = (f"r{number}", 1), [*PROMPT, number], number + 1
        completion_side.grant(key, generation, len(prompt), [3 * number + i for i in range(4)])
        table = [4 * (number // 2) + i for i in range(4)]
        sides[number % 2].prefill(key, prompt, table, generation, chunk=4, credit_bytes=12 * ROW)
    for number in range(24):
        key = (f"r{number}", 1)
        completion_side.work(key)
        assert key in completion_side.completed, completion_side.failed
    for number in range(24):
        prompt = [*PROMPT, number]
        assert completion_side.continue_there((f"r{number}", 1), prompt, 1) == expected_tokens(prompt, 1, VOCAB)
    assert {side.next_end().outcome for side in sides for _ in range(12)} == {"acked"}
    assert [side.num_opened for side in sides] == [1, 1]


def test_credits_bound_what_is_on_its_way(connect: Connect, completion_side: CompletionSide) -> None:
    prompt_side = connect(limits=SenderLimits(10 * ROW, 1, 5.0))
    completion_side.grant(KEY, 3, len(PROMPT), [9, 2, 7, 11])
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3, credit_bytes=25 * ROW)
    taken = [completion_side.take_one()]
    while (more := completion_side.take_one_or_none(within_s=0.5)) is not None:
        taken.append(more)
    assert 15 * ROW < sum(received.payload.nbytes for received in taken) <= 25 * ROW
    for received in taken:
        completion_side.handle(received)
    completion_side.work(KEY)
    assert completion_side.continue_there(KEY, PROMPT, 3) == expected_tokens(PROMPT, 3, VOCAB)


def test_a_frame_of_an_old_generation_writes_nothing(connect: Connect, completion_side: CompletionSide) -> None:
    prompt_side = connect()
    completion_side.grant(KEY, 4, len(PROMPT), [9, 2, 7, 11])  # a newer generation than the sender's
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3)
    while not isinstance(completion_side.take_and_handle().message, Cancelled):
        pass
    ended = prompt_side.next_end()
    assert (ended.outcome, "old generation" in ended.reason) == ("cancelled", True)
    assert completion_side.core.is_open(KEY), "the newer transfer is untouched"
    assert not any(completion_side.engine.gather([9, 2, 7], range(3), range(len(PROMPT))))


def test_a_payload_that_was_damaged_on_its_way_is_refused(channel: Channel, completion_side: CompletionSide) -> None:
    """Nothing is written, the sender is told why, and the next attempt over the same connection is right."""

    class Damaging:
        def __init__(self, sender: SenderEnd) -> None:
            self._sender, self._is_armed = sender, True
            self.sources, self.receive, self.close = sender.sources, sender.receive, sender.close

        def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
            if self._is_armed and isinstance(message, KVFrame):
                self._is_armed = False
                payload = bytes([payload[0] ^ 1]) + bytes(payload[1:])
            self._sender.send(message, payload)

    prompt_side = PromptSide(lambda: Damaging(channel.open_sender()))
    completion_side.grant(KEY, 3, len(PROMPT), [9, 2, 7, 11])
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3)
    completion_side.work(KEY)
    assert completion_side.failed == {KEY: "the checksum is wrong"}
    assert prompt_side.next_end() == Closed(KEY, "cancelled", "the receiver refused: the checksum is wrong")
    assert not any(completion_side.engine.gather([9, 2, 7], range(3), range(len(PROMPT))))
    again: Key = ("r", 2)
    completion_side.grant(again, 4, len(PROMPT), [9, 2, 7, 11])
    prompt_side.prefill(again, PROMPT, [6, 1, 0, 3], 4)
    completion_side.work(again)
    assert prompt_side.next_end() == Closed(again, "acked", "")
    assert completion_side.continue_there(again, PROMPT, 3) == expected_tokens(PROMPT, 3, VOCAB)
    prompt_side.thread.stop()


def test_a_cancel_in_the_middle_reaches_the_receiver(connect: Connect, completion_side: CompletionSide) -> None:
    """Behind frames that nobody has taken yet; another transfer over the connection is none the worse for it."""
    prompt_side = connect(limits=SenderLimits(4 * ROW, 1, 5.0))
    other: Key = ("other", 1)
    completion_side.grant(KEY, 3, 8, [0, 1])
    completion_side.grant(other, 4, len(PROMPT), [9, 2, 7, 11])
    prompt_side.thread.open(KEY, 3, 1 << 20, 0, [4, 5])
    for layer in range(2):
        prompt_side.thread.layer_written(KEY, layer, range(8))
    completion_side.take_and_handle()
    prompt_side.prefill(other, PROMPT, [6, 1, 0, 3], 4)
    prompt_side.thread.abort(KEY, "the client left")
    completion_side.work(KEY)
    completion_side.work(other)
    ends = {closed.key: closed for closed in (prompt_side.next_end() for _ in range(2))}
    assert ends == {KEY: Closed(KEY, "cancelled", "the client left"), other: Closed(other, "acked", "")}
    assert completion_side.released == [KEY]
    assert completion_side.continue_there(other, PROMPT, 3) == expected_tokens(PROMPT, 3, VOCAB)


def test_a_sender_that_is_gone_in_mid_transfer_harms_nobody_else(
    connect: Connect, completion_side: CompletionSide
) -> None:
    """What it announced and did not send is waited for by nobody for long; its blocks come home with its lease."""
    gone, lives = connect(limits=SenderLimits(2 * ROW, 1, 60.0)), connect()
    other: Key = ("other", 1)
    completion_side.grant(KEY, 3, 8, [0, 1])
    completion_side.grant(other, 4, len(PROMPT), [9, 2, 7, 11])
    gone.thread.open(KEY, 3, 1 << 20, 0, [4, 5])
    for layer in range(2):
        gone.thread.layer_written(KEY, layer, range(8))
    completion_side.take_and_handle()
    gone.thread.stop(wait_s=20.0)
    assert gone.next_end().outcome == "failed"
    lives.prefill(other, PROMPT, [6, 1, 0, 3], 4)
    completion_side.work(other)
    assert lives.next_end() == Closed(other, "acked", "")
    assert completion_side.continue_there(other, PROMPT, 3) == expected_tokens(PROMPT, 3, VOCAB)
    completion_side.expire(time.monotonic() + 60)
    assert completion_side.released == [KEY]


def test_a_receiver_that_is_gone_in_mid_transfer_fails_the_transfer(
    kind: Kind, context: Context, socket_folder: Path
) -> None:
    """By its closed connection or by the lease, and then the sender can serve another one."""
    channel = make_channel(kind, context, socket_folder)
    side = CompletionSide(channel.receiver, FakeEngine(12, 5, VOCAB), Receiver(FAKE_LAYOUT, 5.0))
    prompt_side = PromptSide(channel.open_sender, replace(LIMITS, max_frame_bytes=2 * ROW, lease_s=0.5))
    side.grant(KEY, 3, len(PROMPT), [9, 2, 7, 11])
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3, credit_bytes=6 * ROW)
    side.take_and_handle()
    channel.receiver.close()
    assert prompt_side.next_end().outcome in ("failed", "cancelled")
    prompt_side.thread.stop(wait_s=20.0)


def test_closing_with_frames_on_their_way_takes_no_time(kind: Kind, context: Context, socket_folder: Path) -> None:
    """Nobody is waited for; the fixtures find every thread and descriptor gone."""
    channel = make_channel(kind, context, socket_folder)
    senders = [channel.open_sender() for _ in range(3)]
    payload = memoryview(bytes(60_000))
    for sender in senders:
        for number in range(8):
            sender.send(kv_frame(number, bytes(payload)), payload)
    heard: set[bytes] = set()
    deadline_s = time.monotonic() + 30
    while len(heard) < 3:  # a pair of Gloo that is still connecting can be ended by nothing but its own time limit
        assert time.monotonic() < deadline_s, "a sender is not heard"
        for sender in senders:
            sender.receive()
        received = channel.receiver.receive()
        heard |= {received.peer} if received is not None else set()
        time.sleep(0.001)
    started_s = time.monotonic()
    channel.receiver.close()
    for sender in senders:
        sender.close()
    assert time.monotonic() - started_s < 3.0
