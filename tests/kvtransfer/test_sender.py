"""The sending side of transfers: what is sent, when, how much at once, and how each transfer ends."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from state_machines import LONG, LONG_S, SHORT
from twinpool.cluster.protocol.messages import PrefillStages, SampledToken
from twinpool.kvtransfer.frames import Cancelled, Done, Reject, extend_digest
from twinpool.kvtransfer.layout import KVLayout
from twinpool.kvtransfer.sender import (
    Closed,
    FirstOutput,
    Key,
    Sender,
    SenderCommand,
    SenderLimits,
    SendFrame,
    SendMessage,
)

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, dtype="float32")  # 32 bytes a token and layer
ROW = LAYOUT.frame_bytes(1, 1)
KEY: Key = ("r", 1)
STAGES = PrefillStages(queue_s=0, prefill_s=1, num_computed_tokens=8, num_kv_bytes=9, num_kv_bytes_arrived=8)
OUTPUT = FirstOutput(0, SampledToken(token=42), STAGES)
WIDE = SenderLimits(max_frame_bytes=1 << 20, min_frame_bytes=1, lease_s=5.0)


def send_all(sender: Sender, now: float = 0.0) -> list[SenderCommand]:
    """Carry out everything that is due, as a thread would."""
    commands: list[SenderCommand] = []
    while (command := sender.next_command(now)) is not None:
        if isinstance(command, SendFrame):
            num_bytes = LAYOUT.frame_bytes(len(command.layers), len(command.tokens))
            sender.frame_sent(command.key, num_bytes, 1000 + command.sequence)
        commands.append(command)
    return commands


def ranges(commands: list[SenderCommand]) -> list[tuple[int, int, int, int]]:
    frames = [c for c in commands if isinstance(c, SendFrame)]
    return [(f.layers.start, f.layers.stop, f.tokens.start, f.tokens.stop) for f in frames]


def messages(commands: list[SenderCommand]) -> list[object]:
    return [type(c.message) if isinstance(c, SendMessage) else c for c in commands if not isinstance(c, SendFrame)]


def opened(limits: SenderLimits = WIDE, credit_bytes: int = 1 << 30, first_token: int = 0) -> Sender:
    sender = Sender(LAYOUT, limits)
    sender.open(KEY, 7, credit_bytes, first_token)
    return sender


def write(sender: Sender, tokens: range, layers: range = range(3)) -> None:
    for layer in layers:
        sender.layer_written(KEY, layer, tokens)


def test_each_layer_is_sent_as_soon_as_it_is_written() -> None:
    sender = opened()
    sent: list[list[tuple[int, int, int, int]]] = []
    for layer in range(3):
        sender.layer_written(KEY, layer, range(8))
        sent.append(ranges(send_all(sender)))
    assert sent == [[(0, 1, 0, 8)], [(1, 2, 0, 8)], [(2, 3, 0, 8)]]


def test_what_an_earlier_attempt_brought_is_not_sent_again() -> None:
    """Each layer begins where the receiver has nothing yet; layers that begin together still share a frame."""
    sender = Sender(LAYOUT, WIDE)
    sender.open(KEY, 7, 1 << 30, 0, arrived_tokens=(8, 4, 4))
    write(sender, range(6))
    write(sender, range(6, 8))
    assert ranges(send_all(sender)) == [(1, 3, 4, 6), (1, 3, 6, 8)]
    sender.finish(KEY, OUTPUT)
    *_, last = send_all(sender)
    assert isinstance(last, SendMessage)
    assert isinstance(last.message, Done)
    assert last.message.num_frames == 2


def test_done_follows_the_last_frame_and_says_what_was_sent() -> None:
    sender = opened()
    write(sender, range(8))
    sender.finish(KEY, OUTPUT)
    *_, last = send_all(sender)
    assert isinstance(last, SendMessage)
    done = last.message
    assert isinstance(done, Done)
    digest = extend_digest(0, 1000)
    assert (done.num_frames, done.digest, done.generation) == (1, digest, 7)
    assert (done.key, done.position, done.token, done.stages) == (KEY, 0, OUTPUT.token, STAGES)
    sender.acked(KEY, 7)
    assert send_all(sender) == [Closed(KEY, "acked", "")]
    assert len(sender) == 0


def test_no_credit_no_frame_and_no_done() -> None:
    """The second frame waits until the first has been confirmed; Done comes after both."""
    sender = opened(SenderLimits(ROW * 8, 1, 5.0), credit_bytes=ROW * 12)
    write(sender, range(8), range(2))
    sender.finish(KEY, OUTPUT)
    first = send_all(sender)
    assert (ranges(first), messages(first)) == ([(0, 1, 0, 8)], [])
    sender.credited(KEY, 7, ROW * 4, 0.0)
    second = send_all(sender)
    assert (ranges(second), messages(second)) == ([(1, 2, 0, 8)], [Done])
    assert (sender.num_sent_bytes(KEY), sender.num_arrived_bytes(KEY)) == (ROW * 16, ROW * 4)


def test_bytes_in_flight_reach_exactly_the_credit() -> None:
    sender = opened(SenderLimits(ROW * 4, 1, 5.0), credit_bytes=ROW * 8)
    write(sender, range(4))
    assert ranges(send_all(sender)) == [(0, 1, 0, 4), (1, 2, 0, 4)], "a third would be 12 rows"
    sender.credited(KEY, 7, ROW * 4 - 1, 0.0)
    assert send_all(sender) == [], "one byte short"
    sender.credited(KEY, 7, 1, 0.0)
    assert ranges(send_all(sender)) == [(2, 3, 0, 4)]


def test_a_frame_larger_than_the_credit_goes_alone() -> None:
    """Otherwise it would wait for ever."""
    sender = opened(SenderLimits(ROW * 8, 1, 5.0), credit_bytes=ROW)
    write(sender, range(8), range(2))
    assert ranges(send_all(sender)) == [(0, 1, 0, 8)]
    sender.credited(KEY, 7, ROW * 8, 0.0)
    assert ranges(send_all(sender)) == [(1, 2, 0, 8)]


def test_small_layers_join_up_to_the_least_frame() -> None:
    limits = SenderLimits(1 << 20, ROW * 8, 5.0)
    sender = opened(limits)
    sender.layer_written(KEY, 0, range(4))
    assert send_all(sender) == [], "4 rows are too few"
    sender.layer_written(KEY, 1, range(4))
    assert ranges(send_all(sender)) == [(0, 2, 0, 4)]
    sender.layer_written(KEY, 2, range(4))
    assert ranges(send_all(sender)) == [(2, 3, 0, 4)], "the last layer waits for nothing"


def test_a_waiting_small_layer_goes_when_the_next_chunk_comes() -> None:
    """Layers of different chunks do not join; the older may not wait any longer."""
    sender = opened(SenderLimits(1 << 20, ROW * 100, 5.0))
    write(sender, range(2), range(2))
    assert send_all(sender) == []
    sender.layer_written(KEY, 2, range(2))
    write(sender, range(2, 4), range(1))
    assert ranges(send_all(sender)) == [(0, 3, 0, 2)]


def test_a_large_layer_is_cut_at_the_most_a_frame_holds() -> None:
    sender = opened(SenderLimits(ROW * 5 + 3, 1, 5.0))
    write(sender, range(12), range(1))
    assert ranges(send_all(sender)) == [(0, 1, 0, 5), (0, 1, 5, 10), (0, 1, 10, 12)]


def test_a_row_larger_than_a_frame_goes_alone() -> None:
    sender = opened(SenderLimits(ROW - 1, 1, 5.0))
    write(sender, range(3), range(1))
    assert ranges(send_all(sender)) == [(0, 1, 0, 1), (0, 1, 1, 2), (0, 1, 2, 3)]


@pytest.mark.parametrize(("first_token", "expected"), [(3, [(0, 3, 3, 8)]), (0, [(0, 3, 0, 8)]), (8, []), (9, [])])
def test_what_the_receiver_has_already_is_skipped(first_token: int, expected: list[tuple[int, int, int, int]]) -> None:
    sender = opened(first_token=first_token)
    write(sender, range(8))
    sender.finish(KEY, OUTPUT)
    commands = send_all(sender)
    assert ranges(commands) == expected
    assert messages(commands) == [Done]


def test_a_chunk_that_begins_in_the_cached_part_is_sent_from_its_end() -> None:
    sender = opened(first_token=6)
    write(sender, range(4))
    write(sender, range(4, 8))
    assert ranges(send_all(sender)) == [(0, 3, 6, 8)]


def test_waiting_for_credit_ends_with_the_lease() -> None:
    sender = opened(SenderLimits(ROW * 4, 1, 5.0), credit_bytes=ROW * 4)
    write(sender, range(4))
    send_all(sender, 10.0)
    assert sender.deadline() == 15.0
    assert sender.is_bounded()
    assert send_all(sender, 14.99) == []
    cancelled, closed = send_all(sender, 15.0)
    assert isinstance(cancelled, SendMessage)
    assert cancelled.message == Cancelled(request_id="r", attempt=1, generation=7)
    assert closed == Closed(KEY, "cancelled", "the receiver was silent for 5 s")
    assert sender.deadline() is None


def test_a_credit_renews_the_lease() -> None:
    sender = opened(SenderLimits(ROW, 1, 5.0), credit_bytes=ROW)
    write(sender, range(2), range(1))
    send_all(sender, 0.0)
    assert sender.deadline() == 5.0
    sender.credited(KEY, 7, 1, 4.0)
    assert send_all(sender, 6.0) == [], "still short of credit, but the receiver lives"
    assert sender.deadline() == 11.0


def test_computing_is_not_waiting() -> None:
    """While the engine has written nothing new there is no deadline: the wait is for ourselves (I6)."""
    sender = opened()
    write(sender, range(4))
    send_all(sender, 0.0)
    assert sender.deadline() is None
    sender.credited(KEY, 7, ROW, 1.0)
    assert sender.deadline() is None
    assert send_all(sender, 1e6) == []


def test_waiting_for_the_ack_ends_with_the_lease() -> None:
    sender = opened()
    write(sender, range(4))
    sender.finish(KEY, OUTPUT)
    send_all(sender, 10.0)
    assert sender.deadline() == 15.0
    sender.credited(KEY, 7, ROW * 12, 12.0)
    assert sender.deadline() == 17.0, "the receiver is at work"
    commands = send_all(sender, 17.0)
    assert messages(commands) == [Cancelled, Closed(KEY, "cancelled", "the receiver was silent for 5 s")]


def test_abort_says_cancelled_then_closes() -> None:
    sender = opened()
    write(sender, range(4))
    sender.abort(KEY, "the client left")
    commands = send_all(sender)
    assert ranges(commands) == [], "nothing is sent after an abort"
    assert messages(commands) == [Cancelled, Closed(KEY, "cancelled", "the client left")]
    sender.abort(KEY, "again")
    assert send_all(sender) == []


def test_an_abort_says_whether_the_request_is_finished() -> None:
    """So that the receiver does not take the end of a request for a failure."""
    for is_finished in (False, True):
        sender = opened()
        sender.abort(KEY, "over", is_finished)
        first = send_all(sender)[0]
        assert isinstance(first, SendMessage)
        assert first.message == Cancelled(request_id="r", attempt=1, generation=7, is_finished=is_finished)


def test_a_refusal_of_this_generation_aborts() -> None:
    sender = opened()
    old, new = (Reject(request_id="r", attempt=1, generation=g, reason="bad checksum") for g in (6, 7))
    sender.rejected(old)
    assert send_all(sender) == []
    sender.rejected(new)
    assert messages(send_all(sender)) == [
        Cancelled,
        Closed(KEY, "cancelled", "the receiver refused: bad checksum"),
    ]


def test_a_dead_peer_fails_every_transfer_and_is_told_nothing() -> None:
    sender = opened()
    sender.open(("other", 1), 8, 100, 0)
    write(sender, range(4))
    sender.peer_gone()
    assert send_all(sender) == [
        Closed(KEY, "failed", "the COMPLETION worker is gone"),
        Closed(("other", 1), "failed", "the COMPLETION worker is gone"),
    ]
    sender.peer_gone()
    assert send_all(sender) == []


def test_replies_of_another_generation_mean_nothing() -> None:
    sender = opened(SenderLimits(ROW, 1, 5.0), credit_bytes=ROW)
    write(sender, range(2), range(1))
    send_all(sender)
    sender.credited(KEY, 6, ROW, 0.0)
    assert (send_all(sender), sender.num_arrived_bytes(KEY)) == ([], 0)
    sender.credited(KEY, 7, ROW, 0.0)
    sender.finish(KEY, OUTPUT)
    assert len(send_all(sender)) == 2
    sender.acked(KEY, 6)
    assert send_all(sender) == []


def test_an_ack_before_done_means_nothing() -> None:
    """A receiver that answers too much must not get blocks freed that are still to be sent."""
    sender = opened()
    write(sender, range(4))
    sender.acked(KEY, 7)
    assert ranges(send_all(sender)) == [(0, 3, 0, 4)]
    assert len(sender) == 1


def test_more_credit_than_was_sent_is_not_believed() -> None:
    sender = opened(SenderLimits(ROW, 1, 5.0), credit_bytes=ROW * 2)
    write(sender, range(5), range(1))
    send_all(sender)
    sender.credited(KEY, 7, ROW * 100, 0.0)
    assert sender.num_arrived_bytes(KEY) == ROW * 2
    assert len(ranges(send_all(sender))) == 2


def test_transfers_take_turns() -> None:
    """A large transfer does not keep a small one waiting."""
    sender = opened(SenderLimits(ROW, 1, 5.0))
    write(sender, range(4), range(1))
    other: Key = ("other", 1)
    sender.open(other, 8, 1 << 20, 0)
    sender.layer_written(other, 0, range(2))
    order = [c.key[0] for c in send_all(sender) if isinstance(c, SendFrame)]
    assert order == ["r", "other", "r", "other", "r", "r"]


def test_unknown_keys_are_fine() -> None:
    """Events that cross with the end of a transfer."""
    sender = Sender(LAYOUT, WIDE)
    write(sender, range(4))
    sender.finish(KEY, OUTPUT)
    sender.abort(KEY, "x")
    sender.acked(KEY, 1)
    sender.credited(KEY, 1, 1, 0.0)
    assert send_all(sender) == []
    assert (sender.num_arrived_bytes(KEY), sender.num_sent_bytes(KEY), sender.deadline()) == (0, 0, None)


@given(
    chunks=st.lists(st.integers(1, 13), min_size=1, max_size=6),
    first_token=st.integers(0, 20),
    max_rows=st.integers(0, 30),
    min_rows=st.integers(0, 40),
    credit_rows=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
@settings(max_examples=300, deadline=None)
def test_frames_cover_every_row_once_within_all_limits(
    chunks: list[int], first_token: int, max_rows: int, min_rows: int, credit_rows: int, seed: int
) -> None:
    """Any chunking, limits and timing: each (layer, token) once, layers in token order, sizes and credits kept."""
    rng = random.Random(seed)
    limits = SenderLimits(max(1, max_rows * ROW + rng.randrange(ROW)), min_rows * ROW + 1, 5.0)
    sender = opened(limits, credit_rows * ROW, first_token)
    written = [(layer, range(sum(chunks[:i]), sum(chunks[: i + 1]))) for i in range(len(chunks)) for layer in range(3)]
    seen: set[tuple[int, int]] = set()
    in_flight: list[int] = []
    next_token = [first_token] * 3
    done: Done | None = None
    while done is None:
        if written and rng.random() < 0.5:
            sender.layer_written(KEY, *written.pop(0))
            if not written:
                sender.finish(KEY, OUTPUT)
        command = sender.next_command(0.0)
        if command is None:
            assert sender.is_bounded()
            assert written or in_flight, "it waits for nothing"
            if in_flight and rng.random() < 0.7:
                sender.credited(KEY, 7, in_flight.pop(0), 0.0)
            continue
        if isinstance(command, SendMessage):
            assert isinstance(command.message, Done)
            done = command.message
            continue
        assert isinstance(command, SendFrame)
        num_rows = len(command.layers) * len(command.tokens)
        assert num_rows * ROW <= limits.max_frame_bytes or num_rows == 1
        in_flight.append(num_rows * ROW)
        assert sum(in_flight) <= credit_rows * ROW or len(in_flight) == 1
        for layer in command.layers:
            assert command.tokens.start == next_token[layer]
            next_token[layer] = command.tokens.stop
        cells = {(layer, token) for layer in command.layers for token in command.tokens}
        assert cells
        assert not cells & seen
        seen |= cells
        sender.frame_sent(KEY, num_rows * ROW, 1)
    assert not written
    assert seen == {(layer, token) for layer in range(3) for token in range(first_token, sum(chunks))}
    assert sender.num_sent_bytes(KEY) == len(seen) * ROW


@dataclass
class Outgoing:
    generation: int
    written: list[tuple[int, range]]
    is_finished: bool = False
    in_flight: int = 0
    done_sent: bool = False
    last: object = None
    closed: list[Closed] = field(default_factory=list[Closed])


class AnyEvents(RuleBasedStateMachine):
    """Several transfers, right and stale replies, aborts, deaths and time: one Closed each, nothing after it."""

    names = st.sampled_from("abc")
    CREDIT = 6 * ROW

    def __init__(self) -> None:
        super().__init__()
        self.sender = Sender(LAYOUT, SenderLimits(4 * ROW, 3 * ROW, 5.0))
        self.now = 0.0
        self.num_opened = 0
        self.open: dict[str, Outgoing] = {}
        self.ended: list[Outgoing] = []

    def key(self, name: str) -> Key:
        return (name, self.open[name].generation)

    @rule(name=names, chunks=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def start(self, name: str, chunks: list[int]) -> None:
        if name in self.open:
            return
        self.num_opened += 1
        spans = [range(sum(chunks[:i]), sum(chunks[: i + 1])) for i in range(len(chunks))]
        self.open[name] = Outgoing(self.num_opened, [(layer, span) for span in spans for layer in range(3)])
        self.sender.open(self.key(name), self.num_opened, self.CREDIT, 0)

    @rule(name=names)
    def compute(self, name: str) -> None:
        transfer = self.open.get(name)
        if transfer is not None and transfer.written:
            self.sender.layer_written(self.key(name), *transfer.written.pop(0))
        elif transfer is not None and not transfer.is_finished:
            transfer.is_finished = True
            self.sender.finish(self.key(name), OUTPUT)

    @rule(name=names, is_stale=st.booleans())
    def credit(self, name: str, is_stale: bool) -> None:
        if name in self.open:
            transfer = self.open[name]
            num_bytes = transfer.in_flight // 2 + transfer.in_flight % 2
            self.sender.credited(self.key(name), transfer.generation - is_stale, num_bytes, self.now)
            transfer.in_flight -= 0 if is_stale else num_bytes

    @rule(name=names, is_stale=st.booleans())
    def ack(self, name: str, is_stale: bool) -> None:
        if name in self.open:
            self.sender.acked(self.key(name), self.open[name].generation - is_stale)

    @rule(name=names, generation_back=st.integers(0, 1))
    def reject(self, name: str, generation_back: int) -> None:
        generation = self.open[name].generation - generation_back if name in self.open else 0
        if generation:
            request_id, attempt = self.key(name)
            self.sender.rejected(Reject(request_id=request_id, attempt=attempt, generation=generation, reason="no"))

    @rule(name=names)
    def abort(self, name: str) -> None:
        if name in self.open:
            self.sender.abort(self.key(name), "left")

    @rule()
    def peer_dies(self) -> None:
        self.sender.peer_gone()

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(most=st.integers(1, 30))
    def work(self, most: int) -> None:
        for _ in range(most):
            command = self.sender.next_command(self.now)
            if command is None:
                assert self.sender.is_bounded()
                assert len(self.sender) == len(self.open), "a transfer ended without Closed"
                return
            self._carry_out(command)

    def _carry_out(self, command: SenderCommand) -> None:
        name = command.message.key[0] if isinstance(command, SendMessage) else command.key[0]
        transfer = self.open[name]
        match command:
            case SendFrame():
                assert command.generation == transfer.generation
                assert not transfer.done_sent
                assert not isinstance(transfer.last, Cancelled), "a frame after Cancelled"
                num_bytes = LAYOUT.frame_bytes(len(command.layers), len(command.tokens))
                transfer.in_flight += num_bytes
                assert transfer.in_flight <= self.CREDIT
                self.sender.frame_sent(command.key, num_bytes, 1)
            case SendMessage():
                assert command.message.generation == transfer.generation
                assert not isinstance(transfer.last, Cancelled), "a message after Cancelled"
                if isinstance(command.message, Done):
                    assert transfer.is_finished
                    assert not transfer.done_sent
                    transfer.done_sent = True
                transfer.last = command.message
            case Closed():
                assert command.key == (name, transfer.generation)
                assert (command.outcome == "cancelled") == isinstance(transfer.last, Cancelled)
                assert command.outcome != "acked" or transfer.done_sent
                transfer.closed.append(command)
                self.ended.append(self.open.pop(name))

    @invariant()
    def each_ended_once(self) -> None:
        assert all(len(transfer.closed) == 1 for transfer in self.ended)
        assert len(self.sender) <= len(self.open)

    def teardown(self) -> None:
        self.sender.peer_gone()
        while (command := self.sender.next_command(self.now)) is not None:
            self._carry_out(command)
        assert not self.open
        assert len(self.ended) == self.num_opened


AnyEvents.TestCase.settings = SHORT
TestAnyEvents = AnyEvents.TestCase


@pytest.mark.slow
@pytest.mark.timeout(LONG_S)
def test_many_more_lives_of_a_sender() -> None:
    run_state_machine_as_test(AnyEvents, settings=LONG)
