"""The receiving side of transfers: nothing but a correct, complete transfer passes, and no wrong byte is written."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from state_machines import LONG, LONG_S, SHORT
from twinpool.cluster.protocol.messages import PrefillStages, SampledToken
from twinpool.kvtransfer.frames import Ack, Cancelled, Credit, Done, KVFrame, Reject, extend_digest
from twinpool.kvtransfer.layout import KVLayout
from twinpool.kvtransfer.receiver import (
    Complete,
    Key,
    Receiver,
    ReceiverCommand,
    Released,
    Reply,
    TransferFailed,
    Write,
)

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, dtype="float32")
OTHER = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, dtype="bfloat16")  # as many bytes, other meaning
ROW = LAYOUT.frame_bytes(1, 1)
KEY: Key = ("r", 1)
STAGES = PrefillStages(queue_s=0, prefill_s=1, num_computed_tokens=8, num_kv_bytes=9, num_kv_bytes_arrived=8)


def frame(sequence: int, layers: range, tokens: range, generation: int = 7, key: Key = KEY, **changes: Any) -> KVFrame:
    fields: dict[str, Any] = {
        "request_id": key[0],
        "attempt": key[1],
        "generation": generation,
        "layout": LAYOUT.fingerprint,
        "sequence": sequence,
        "layer_start": layers.start,
        "layer_end": layers.stop,
        "token_start": tokens.start,
        "token_end": tokens.stop,
        "num_bytes": LAYOUT.frame_bytes(len(layers), len(tokens)),
        "checksum": 1000 + sequence,
    }
    return KVFrame(**(fields | changes))


def done(num_frames: int, generation: int = 7, key: Key = KEY, **changes: Any) -> Done:
    digest = 0
    for sequence in range(num_frames):
        digest = extend_digest(digest, 1000 + sequence)
    fields: dict[str, Any] = {
        "request_id": key[0],
        "attempt": key[1],
        "generation": generation,
        "num_frames": num_frames,
        "digest": digest,
        "position": 0,
        "token": SampledToken(token=3),
        "stages": STAGES,
    }
    return Done(**(fields | changes))


def cancelled(generation: int = 7, key: Key = KEY) -> Cancelled:
    return Cancelled(request_id=key[0], attempt=key[1], generation=generation)


def granted(tokens: range = range(8), now: float = 0.0) -> Receiver:
    receiver = Receiver(LAYOUT, lease_s=5.0)
    receiver.grant(KEY, 7, tokens, now)
    return receiver


def take(receiver: Receiver, message: KVFrame, now: float = 0.0, **how: Any) -> list[ReceiverCommand]:
    return receiver.frame(message, how.get("num_bytes", message.num_bytes), how.get("is_intact", True), now)


def reject(reason: str, generation: int = 7) -> Reply:
    return Reply(Reject(request_id="r", attempt=1, generation=generation, reason=reason))


def test_a_correct_transfer_is_written_credited_and_completed() -> None:
    receiver = granted()
    chunks = [(range(2), range(5)), (range(2, 3), range(5)), (range(3), range(5, 8))]
    for sequence, (layers, tokens) in enumerate(chunks):
        num_bytes = LAYOUT.frame_bytes(len(layers), len(tokens))
        credit = Credit(request_id="r", attempt=1, generation=7, num_bytes=num_bytes)
        expected = [Write(KEY, 7, layers, tokens), Reply(credit)]
        assert take(receiver, frame(sequence, layers, tokens)) == expected
    end = done(3)
    assert receiver.done(end) == [Reply(Ack(request_id="r", attempt=1, generation=7)), Complete(KEY, end)]
    assert (len(receiver), receiver.num_dropped_frames) == (0, 0)


def test_only_what_was_granted_is_due() -> None:
    """With three tokens cached the transfer begins at the fourth."""
    receiver = granted(range(3, 8))
    assert take(receiver, frame(0, range(3), range(3, 8)))
    assert receiver.done(done(1))[1:] == [Complete(KEY, done(1))]


def test_a_prompt_that_is_cached_whole_needs_no_frame() -> None:
    receiver = granted(range(8, 8))
    assert receiver.done(done(0))[1:] == [Complete(KEY, done(0))]


WRONG_FRAMES: dict[str, tuple[KVFrame, dict[str, Any], str]] = {
    "layout": (frame(1, range(3), range(4, 8), layout=OTHER.fingerprint), {}, "is not this cache's"),
    "skipped a frame": (frame(2, range(3), range(4, 8)), {}, "frame 2 came where 1 was due"),
    "no layers": (frame(1, range(1, 1), range(4, 8)), {}, "layers 1 to 1 of 3"),
    "layers reversed": (frame(1, range(3), range(4, 8), layer_start=2, layer_end=1), {}, "layers 2 to 1"),
    "too many layers": (frame(1, range(4), range(4, 8)), {}, "layers 0 to 4 of 3"),
    "no tokens": (frame(1, range(3), range(4, 4)), {}, "tokens 4 to 4 of 8"),
    "too many tokens": (frame(1, range(3), range(4, 9)), {}, "tokens 4 to 9 of 8"),
    "a gap": (frame(1, range(3), range(5, 8)), {}, "gap or overlap"),
    "an overlap": (frame(1, range(3), range(3, 8)), {}, "gap or overlap"),
    "one layer overlaps": (frame(1, range(2), range(8)), {}, "gap or overlap"),
    "payload too short": (frame(1, range(3), range(4, 8)), {"num_bytes": 12 * ROW - 1}, "bytes came where"),
    "payload too long": (frame(1, range(3), range(4, 8)), {"num_bytes": 12 * ROW + 1}, "bytes came where"),
    "header lies about it": (frame(1, range(3), range(4, 8), num_bytes=5), {"num_bytes": 12 * ROW}, "bytes came where"),
    "both lie": (frame(1, range(3), range(4, 8), num_bytes=5), {"num_bytes": 5}, "5 bytes came where 384 were due"),
    "checksum": (frame(1, range(3), range(4, 8)), {"is_intact": False}, "the checksum is wrong"),
}


@pytest.mark.parametrize("name", WRONG_FRAMES)
def test_a_wrong_frame_is_not_written_and_ends_the_transfer(name: str) -> None:
    """The sender is told why; the blocks stay reserved until it says that it has stopped."""
    wrong, how, reason = WRONG_FRAMES[name]
    receiver = granted()
    take(receiver, frame(0, range(3), range(4)))
    commands = take(receiver, wrong, **how)
    reply, failed = commands
    assert isinstance(failed, TransferFailed)
    assert reason in failed.reason
    assert reply == reject(failed.reason)
    assert receiver.num_dropped_frames == 1
    assert not receiver.is_open(KEY)
    assert take(receiver, frame(1, range(3), range(4, 8))) == [], "even a right frame comes too late"
    assert receiver.done(done(2)) == []
    assert receiver.cancelled(cancelled()) == [Released(KEY)], "failed once, released once"


@pytest.mark.parametrize("change", [{"num_frames": 2}, {"num_frames": 0}, {"digest": 5}])
def test_a_wrong_done_completes_nothing(change: dict[str, int]) -> None:
    receiver = granted()
    take(receiver, frame(0, range(3), range(8)))
    commands = receiver.done(done(1).model_copy(update=change))
    assert [type(command) for command in commands] == [Reply, TransferFailed]
    assert not receiver.is_open(KEY)


def test_a_done_before_the_last_row_completes_nothing() -> None:
    receiver = granted()
    take(receiver, frame(0, range(2), range(8)))
    take(receiver, frame(1, range(2, 3), range(7)))
    failed = receiver.done(done(2))[1]
    assert failed == TransferFailed(KEY, "2 of 2 frames came, 1 rows are missing")


def test_a_frame_of_an_unknown_transfer_is_refused() -> None:
    receiver = Receiver(LAYOUT, 5.0)
    assert take(receiver, frame(0, range(3), range(8))) == [reject("unknown transfer or old generation")]
    assert receiver.done(done(1)) == [reject("unknown transfer or old generation")]
    assert receiver.cancelled(cancelled()) == []
    assert receiver.num_dropped_frames == 1


@pytest.mark.parametrize("generation", [6, 8])
def test_another_generation_touches_nothing(generation: int) -> None:
    """Late frames of an old allocation are dropped; the present transfer goes on."""
    receiver = granted()
    stale = frame(0, range(3), range(8), generation)
    assert take(receiver, stale) == [reject("unknown transfer or old generation", generation)]
    assert receiver.done(done(0, generation)) == [reject("unknown transfer or old generation", generation)]
    assert receiver.cancelled(cancelled(generation)) == []
    assert receiver.is_open(KEY)
    assert isinstance(take(receiver, frame(0, range(3), range(8)))[0], Write)


def test_a_repeated_frame_is_dropped_and_harms_nothing() -> None:
    receiver = granted()
    first = frame(0, range(3), range(4))
    take(receiver, first)
    assert take(receiver, first) == []
    take(receiver, frame(1, range(3), range(4, 8)))
    assert receiver.done(done(2))[1:] == [Complete(KEY, done(2))]
    assert receiver.num_dropped_frames == 1


def test_a_sender_that_stops_by_itself_fails_the_transfer() -> None:
    receiver = granted()
    assert receiver.cancelled(cancelled()) == [TransferFailed(KEY, "the PROMPT worker stopped sending"), Released(KEY)]
    assert len(receiver) == 0


def test_a_sender_whose_request_is_finished_fails_nothing() -> None:
    receiver = granted()
    message = Cancelled(request_id="r", attempt=1, generation=7, is_finished=True)
    assert receiver.cancelled(message) == [Released(KEY)]


def test_cancel_waits_for_an_active_sender() -> None:
    receiver = granted()
    assert receiver.cancel(KEY, True) == []
    assert not receiver.is_open(KEY)
    assert receiver.keys() == [KEY], "the blocks are not free yet"
    assert take(receiver, frame(0, range(3), range(8)), 2.0) == []
    assert receiver.cancelled(cancelled()) == [Released(KEY)]


def test_cancel_without_a_sender_releases_at_once() -> None:
    receiver = granted()
    assert receiver.cancel(KEY, False) == [Released(KEY)]
    assert receiver.cancel(KEY, False) == []
    assert receiver.cancel(KEY, True) == []


def test_a_second_cancel_that_knows_the_sender_is_dead_releases() -> None:
    receiver = granted()
    receiver.cancel(KEY, True)
    assert receiver.cancel(KEY, False) == [Released(KEY)]


def test_a_cancelled_transfer_waits_no_longer_than_its_lease() -> None:
    """It has what was left of it: neither the cancel, nor frames, nor renewals stretch it.

    Regression: what a router had granted just before it died came home after two leases.
    """
    receiver = granted(now=1.0)
    receiver.cancel(KEY, True)
    assert receiver.deadline() == 6.0
    receiver.renew(KEY, 4.0)
    receiver.cancel(KEY, True)
    take(receiver, frame(0, range(3), range(8)), 4.0)
    take(receiver, frame(5, range(3), range(8)), 4.0)
    assert receiver.deadline() == 6.0
    assert receiver.expire(5.99) == []
    assert receiver.expire(6.0) == [Released(KEY)]
    assert receiver.deadline() is None


def test_a_transfer_lives_by_frames_and_renewals() -> None:
    receiver = granted(now=0.0)
    assert receiver.deadline() == 5.0
    receiver.renew(KEY, 2.0)
    assert receiver.deadline() == 7.0
    take(receiver, frame(0, range(3), range(4)), 4.0)
    assert receiver.deadline() == 9.0
    receiver.renew(KEY, 3.0)
    assert receiver.deadline() == 9.0, "a late renewal takes nothing away"
    assert receiver.expire(8.99) == []
    assert receiver.expire(9.0) == [TransferFailed(KEY, "no KV and no renewal for 5 s"), Released(KEY)]
    receiver.renew(KEY, 9.0)
    assert len(receiver) == 0


def test_a_wrong_frame_does_not_renew() -> None:
    receiver = granted(now=0.0)
    take(receiver, frame(0, range(3), range(4), 6), 3.0)
    assert receiver.deadline() == 5.0


def test_a_key_cannot_be_granted_twice() -> None:
    with pytest.raises(AssertionError, match="granted already"):
        granted().grant(KEY, 8, range(8), 0.0)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_single_lie_in_a_header_is_noticed(data: st.DataObject) -> None:
    """Whatever one field of a right frame is changed to: no Write, or a drop; never another range."""
    names = st.sampled_from(["layout", "sequence", "layer_start", "layer_end", "token_start", "token_end", "num_bytes"])
    right = frame(1, range(1, 3), range(4))
    name = data.draw(names)
    value = data.draw(st.integers(0, 12) | st.integers(0, 2**40))
    if getattr(right, name) == value:
        return
    receiver = granted()
    take(receiver, frame(0, range(1), range(8)))
    commands = take(receiver, right.model_copy(update={name: value}), num_bytes=right.num_bytes)
    assert not any(isinstance(command, Write | Complete) for command in commands)


@dataclass
class Stream:
    """What an honest sender would send under one generation, and how much of it the receiver has written."""

    key: Key
    generation: int
    first: int
    length: int
    messages: list[KVFrame]
    written: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    num_taken: int = 0
    is_failed: bool = False
    is_cancelling: bool = False

    @property
    def due(self) -> set[tuple[int, int]]:
        return {(layer, token) for layer in range(3) for token in range(self.first, self.length)}


class AnyEvents(RuleBasedStateMachine):
    """Random orders of right, repeated, skipped, stale and damaged messages, cancels, renewals and time."""

    names = st.sampled_from("ab")

    def __init__(self) -> None:
        super().__init__()
        self.receiver = Receiver(LAYOUT, 5.0)
        self.now = 0.0
        self.generation = 0
        self.live: dict[str, Stream] = {}
        self.old: list[Stream] = []
        self.num_completed = 0

    @rule(name=names, seed=st.integers(0, 10_000), first=st.integers(0, 3), length=st.integers(3, 9))
    def grant(self, name: str, seed: int, first: int, length: int) -> None:
        if name in self.live:
            return
        self.generation += 1
        key = (name, 1)  # the same key again and again: only the generation tells
        frames = self._frames(key, first, length, random.Random(seed))
        self.live[name] = Stream(key, self.generation, first, length, frames)
        self.receiver.grant(key, self.generation, range(first, length), self.now)

    def _frames(self, key: Key, first: int, length: int, rng: random.Random) -> list[KVFrame]:
        frames: list[KVFrame] = []
        start = first
        while start < length:
            end = rng.randrange(start, length) + 1
            cut = rng.randrange(1, 4)
            for layers in (range(cut), range(cut, 3)):
                if layers:
                    frames.append(frame(len(frames), layers, range(start, end), self.generation, key))
            start = end
        return frames

    @rule(name=names)
    def next_frame(self, name: str) -> None:
        stream = self.live.get(name)
        if stream is not None and stream.num_taken < len(stream.messages):
            self._give(stream.messages[stream.num_taken])

    @rule(name=names, which=st.integers(0, 20), is_intact=st.booleans(), extra=st.integers(-1, 1))
    def some_frame(self, name: str, which: int, is_intact: bool, extra: int) -> None:
        stream = self.live.get(name)
        if stream is not None and stream.messages:
            self._give(stream.messages[which % len(stream.messages)], is_intact, extra)

    @rule(which=st.integers(0, 50))
    def stale_frame(self, which: int) -> None:
        messages = [message for stream in self.old for message in stream.messages]
        if messages:
            self._give(messages[which % len(messages)])

    @rule(name=names, is_honest=st.booleans())
    def send_done(self, name: str, is_honest: bool) -> None:
        stream = self.live.get(name)
        if stream is None:
            return
        num_frames = len(stream.messages)
        message = done(num_frames, stream.generation, stream.key, **({} if is_honest else {"digest": 3}))
        commands = self.receiver.done(message)
        is_right = is_honest and stream.written == stream.due and not stream.is_failed and not stream.is_cancelling
        assert any(isinstance(command, Complete) for command in commands) == is_right
        self._handle(commands, stream)

    @rule(name=names, back=st.integers(0, 2))
    def sender_stops(self, name: str, back: int) -> None:
        stream = self.live.get(name)
        if stream is None or stream.generation <= back:
            return
        commands = self.receiver.cancelled(cancelled(stream.generation - back, stream.key))
        assert (Released(stream.key) in commands) == (back == 0)
        self._handle(commands, stream)

    @rule(name=names, is_active=st.booleans())
    def cancel(self, name: str, is_active: bool) -> None:
        stream = self.live.get(name)
        if stream is not None:
            stream.is_cancelling = True
            self._handle(self.receiver.cancel(stream.key, is_active), stream)

    @rule(name=names)
    def renew(self, name: str) -> None:
        self.receiver.renew((name, 1), self.now)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for command in self.receiver.expire(self.now):
            assert isinstance(command, TransferFailed | Released)
            self._handle([command], self.live[command.key[0]])

    def _give(self, message: KVFrame, is_intact: bool = True, extra: int = 0) -> None:
        stream = self.live.get(message.key[0])
        commands = self.receiver.frame(message, message.num_bytes + extra, is_intact, self.now)
        is_current = stream is not None and stream.generation == message.generation
        may_write = is_current and not stream.is_failed and not stream.is_cancelling and is_intact and not extra
        is_next = may_write and message.sequence == stream.num_taken
        assert any(isinstance(command, Write) for command in commands) == is_next
        if is_current:
            self._handle(commands, stream)
        else:
            assert all(isinstance(command, Reply) for command in commands)

    def _handle(self, commands: list[ReceiverCommand], stream: Stream) -> None:
        for command in commands:
            match command:
                case Write():
                    cells = {(layer, token) for layer in command.layers for token in command.tokens}
                    assert command.generation == stream.generation
                    assert not cells & stream.written
                    stream.written |= cells
                    stream.num_taken += 1
                case Reply():
                    assert command.message.generation == stream.generation
                case TransferFailed():
                    assert not stream.is_failed, "failed twice"
                    assert not stream.is_cancelling, "a transfer that was given up cannot fail"
                    stream.is_failed = True
                case Complete():
                    self.num_completed += 1
                    self._end(stream)
                case Released():
                    self._end(stream)

    def _end(self, stream: Stream) -> None:
        del self.live[stream.key[0]]
        self.old.append(stream)

    @invariant()
    def what_is_live_has_a_deadline(self) -> None:
        assert {stream.key for stream in self.live.values()} == set(self.receiver.keys())
        deadline = self.receiver.deadline()
        assert (deadline is None) == (not self.live)
        assert deadline is None or deadline <= self.now + 5.0
        for stream in self.live.values():
            assert self.receiver.is_open(stream.key) == (not stream.is_failed and not stream.is_cancelling)
            assert stream.written <= stream.due


AnyEvents.TestCase.settings = SHORT
TestAnyEvents = AnyEvents.TestCase


@pytest.mark.slow
@pytest.mark.timeout(LONG_S)
def test_many_more_lives_of_a_receiver() -> None:
    run_state_machine_as_test(AnyEvents, settings=LONG)


def test_a_new_attempt_goes_on_where_a_dead_sender_stopped() -> None:
    """Two layers of three had come; the heir asks for the third, and then for the token that came since."""
    receiver, heir = granted(range(8)), ("r", 2)
    receiver.frame(frame(0, range(2), range(8)), LAYOUT.frame_bytes(2, 8), True, 1.0)
    assert receiver.adopt(heir, KEY, 9, 9, 2.0) == (8, 8, 0)
    assert receiver.keys() == [heir]
    late = receiver.frame(frame(1, range(2, 3), range(8)), LAYOUT.frame_bytes(1, 8), True, 2.5)
    assert [type(command) for command in late] == [Reply], "the dead sender's frames are refused"
    commands = receiver.frame(
        frame(0, range(2, 3), range(8), generation=9, key=heir), LAYOUT.frame_bytes(1, 8), True, 3.0
    )
    assert isinstance(commands[0], Write)
    assert (commands[0].generation, commands[0].layers) == (9, range(2, 3))
    early = receiver.done(done(1, generation=9, key=heir))
    assert isinstance(early[-1], TransferFailed), "the ninth token's keys and values are missing"


def test_an_heir_completes_with_what_it_was_sent_itself() -> None:
    receiver, heir = granted(range(8)), ("r", 2)
    receiver.frame(frame(0, range(2), range(8)), LAYOUT.frame_bytes(2, 8), True, 1.0)
    receiver.adopt(heir, KEY, 9, 9, 2.0)
    receiver.frame(frame(0, range(2, 3), range(8), generation=9, key=heir), LAYOUT.frame_bytes(1, 8), True, 3.0)
    receiver.frame(frame(1, range(3), range(8, 9), generation=9, key=heir), LAYOUT.frame_bytes(3, 1), True, 3.0)
    *_, complete = receiver.done(done(2, generation=9, key=heir))
    assert isinstance(complete, Complete)
    assert complete.key == heir
