"""Sender and receiver against each other over a link that loses, repeats, reorders and damages what they say.

Both have real block pools, and caches in which every cell says what was written into it. Nothing but a whole, right
transfer completes; a late frame touches no cell; and when the noise is over every block is home on both sides.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from state_machines import LONG, LONG_S, SHORT
from twinpool.cluster.protocol.messages import PrefillStages, SampledToken
from twinpool.engine.block_pool import BlockPool, blocks_for
from twinpool.kvtransfer.frames import Ack, Cancelled, Credit, DataMessage, Done, KVFrame, Reject
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
from twinpool.kvtransfer.sender import Closed, FirstOutput, Sender, SenderLimits, SendFrame, SendMessage

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, dtype="float32")
ROW = LAYOUT.frame_bytes(1, 1)
LEASE_S = 5.0
NUM_BLOCKS = 10
STAGES = PrefillStages(queue_s=0, prefill_s=1, num_computed_tokens=8, num_kv_bytes=9, num_kv_bytes_arrived=8)
OUTPUT = FirstOutput(0, SampledToken(token=42), STAGES)

Cell = tuple[int, int, int]  # layer, block, place in the block
Content = tuple[int, int, int]  # of which prompt, layer and token


@dataclass
class Cache:
    """One worker's blocks; a cell that nobody has written since its block was freed is not there."""

    block_size: int
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    cells: dict[Cell, Content] = field(default_factory=dict[Cell, Content])

    def places(self, owner: Key, prompt: int, layers: range, tokens: range) -> Iterator[tuple[Cell, Content]]:
        """Yield for each layer and token of `prompt` where it lies and what has to be there."""
        holding = self.pool.holding(owner)
        assert holding is not None, f"{owner} has no blocks"
        for layer, token in itertools.product(layers, tokens):
            cell = (layer, holding.blocks[token // self.block_size], token % self.block_size)
            yield cell, (prompt, layer, token)

    def release(self, owner: Key) -> None:
        holding = self.pool.holding(owner)
        freed = set(holding.blocks) if holding else set[int]()
        self.cells = {cell: content for cell, content in self.cells.items() if cell[1] not in freed}
        self.pool.release(owner)


@dataclass(frozen=True)
class OnTheWay:
    message: DataMessage
    rows: tuple[Content, ...] = ()  # a frame's payload
    is_intact: bool = True


@dataclass
class Prompt:
    """What the PROMPT worker still has to compute of one transfer."""

    generation: int
    written: list[tuple[int, range]]
    is_finished: bool = False


class LossyLink(RuleBasedStateMachine):
    """Random grants, steps, cancels, deaths, leases and faults of the link."""

    names = st.sampled_from("ab")
    which = st.integers(0, 30)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.there = Cache(block_size=2)
        self.receiver = Receiver(LAYOUT, LEASE_S)
        self.lengths: dict[Key, int] = {}
        self.numbers: dict[Key, int] = {}  # of the prompts; attempts that go on from each other share one
        self.generations: dict[Key, int] = {}  # the latest grant of each key
        self.attempts = dict.fromkeys("ab", 0)
        self.running: set[Key] = set()  # completed there, and decoding
        self.completed: set[tuple[Key, int]] = set()
        self.failed: set[tuple[Key, int]] = set()
        self.to_receiver: list[OnTheWay] = []
        self.to_sender: list[DataMessage] = []
        self._start_prompt_worker()

    def _start_prompt_worker(self) -> None:
        self.here = Cache(block_size=3)
        self.sender = Sender(LAYOUT, SenderLimits(4 * ROW, 2 * ROW, LEASE_S))
        self.prompts: dict[Key, Prompt] = {}

    def key(self, name: str) -> Key:
        return (name, self.attempts[name])

    @rule(
        name=names, length=st.integers(1, 9), chunk=st.integers(1, 9), is_patient=st.sampled_from([True, True, False])
    )
    def grant(self, name: str, length: int, chunk: int, is_patient: bool) -> None:
        """A new attempt, seldom beside one that still runs: blocks there, and for the prompt blocks here."""
        if is_patient and self.key(name) in {*self.receiver.keys(), *self.running, *self.prompts}:
            return
        self.attempts[name] += 1
        key = self.key(name)
        self.lengths[key], self.numbers[key] = length, len(self.numbers)
        if self._grant(key):
            self._open(key, chunk)

    @rule(name=names, more=st.integers(0, 2), chunk=st.integers(1, 9))
    def resume(self, name: str, more: int, chunk: int) -> None:
        """The sender dies: a new attempt goes on from what it had sent, with the tokens that have come since."""
        old = self.key(name)
        if not self.receiver.is_open(old):
            return
        self._sender_dies()
        length = self.lengths[old] + more
        if not self.there.pool.extend(old, blocks_for(length, 2) - blocks_for(self.lengths[old], 2)):
            return
        self.attempts[name] += 1
        key = self.key(name)
        self.lengths[key], self.numbers[key] = length, self.numbers[old]
        self.generations[key] = self.there.pool.adopt(key, old).generation
        arrived = self.receiver.adopt(key, old, self.generations[key], length, self.now)
        self._open(key, chunk, arrived)

    def _open(self, key: Key, chunk: int, arrived: tuple[int, ...] = ()) -> None:
        """The prompt begins on the PROMPT worker, if that has blocks for it."""
        length = self.lengths[key]
        if self.here.pool.allocate(key, blocks_for(length, 3), "sequence") is None:
            return
        spans = [range(start, min(start + chunk, length)) for start in range(0, length, chunk)]
        self.prompts[key] = Prompt(self.generations[key], [(layer, span) for span in spans for layer in range(3)])
        self.sender.open(key, self.generations[key], 6 * ROW, 0, arrived)

    @rule(name=names)
    def grant_again(self, name: str) -> None:
        """The router's request is delivered again after the sender's death: the same key, under another generation."""
        key = self.key(name)
        if key not in self.lengths or key in self.running:
            return
        if key in self.prompts:
            self._sender_dies()
        self._execute(self.receiver.cancel(key, False))
        self._grant(key)

    def _grant(self, key: Key) -> bool:
        holding = self.there.pool.allocate(key, blocks_for(self.lengths[key], 2), "granted")
        if holding is None:
            return False
        self.generations[key] = holding.generation
        self.receiver.grant(key, holding.generation, range(self.lengths[key]), self.now)
        return True

    @rule(name=names, most=st.integers(1, 15), most_sent=st.integers(0, 9))
    def work(self, name: str, most: int, most_sent: int) -> None:
        """Compute a part of a prompt; the sender gets to send some of what it may."""
        self.grant(name, 9, 3, True)
        self._compute(name, most)
        self._send(most_sent)

    @rule(name=names, num_rounds=st.integers(1, 4))
    def quiet_spell(self, name: str, num_rounds: int) -> None:
        """For a while the link does as it should."""
        self.grant(name, 7, 5, True)
        for _ in range(num_rounds):
            self._compute(name, 9)
            self._send(20)
            self.deliver_in_order(20)
            self.answer_in_order()

    @rule(name=names, fates=st.lists(st.sampled_from(["arrives", "arrives", "lost", "twice", "late"]), min_size=5))
    def noisy_spell(self, name: str, fates: list[str]) -> None:
        """A prompt is computed and sent over a link that does to each message what it likes."""
        self.grant(name, 8, 3, True)
        fate = itertools.cycle(fates)
        for _ in range(4):
            self._compute(name, 9)
            self._send(20)
            sent, self.to_receiver = self.to_receiver, []
            for one, what in zip(sent, fate, strict=False):
                for _ in range({"arrives": 1, "lost": 0, "twice": 2, "late": 0}[what]):
                    self._give(one)
                if what == "late":
                    self.to_receiver.append(one)
            self.answer_in_order()

    def _compute(self, name: str, most: int) -> None:
        key = self.key(name)
        prompt = self.prompts.get(key)
        for _ in range(most if prompt is not None else 0):
            assert prompt is not None
            if prompt.written:
                layer, tokens = prompt.written.pop(0)
                self.here.cells.update(self.here.places(key, self.numbers[key], range(layer, layer + 1), tokens))
                self.sender.layer_written(key, layer, tokens)
            elif not prompt.is_finished:
                prompt.is_finished = True
                self.sender.finish(key, OUTPUT)

    def _send(self, most: int) -> None:
        for _ in range(most):
            match self.sender.next_command(self.now):
                case SendFrame() as command:
                    self._send_frame(command)
                case SendMessage(message):
                    self.to_receiver.append(OnTheWay(message))
                case Closed() as closed:
                    self._close(closed)
                case None:
                    assert self.sender.is_bounded(), "I6"
                    return

    def _send_frame(self, command: SendFrame) -> None:
        places = list(self.here.places(command.key, self.numbers[command.key], command.layers, command.tokens))
        rows = tuple(self.here.cells[cell] for cell, _ in places)
        assert rows == tuple(content for _, content in places), "what is read is not the prompt's any more"
        num_bytes = len(rows) * ROW
        frame = KVFrame(
            request_id=command.key[0],
            attempt=command.key[1],
            generation=command.generation,
            layout=LAYOUT.fingerprint,
            sequence=command.sequence,
            layer_start=command.layers.start,
            layer_end=command.layers.stop,
            token_start=command.tokens.start,
            token_end=command.tokens.stop,
            num_bytes=num_bytes,
            checksum=hash(rows) % 2**64,
        )
        self.to_receiver.append(OnTheWay(frame, rows))
        self.sender.frame_sent(command.key, num_bytes, frame.checksum)

    def _close(self, closed: Closed) -> None:
        prompt = self.prompts.pop(closed.key)  # fails for a second close
        assert closed.outcome != "acked" or (closed.key, prompt.generation) in self.completed, "acked, not arrived"
        self.here.release(closed.key)

    @precondition(lambda self: self.to_receiver)
    @rule(which=which, is_kept=st.booleans())
    def deliver(self, which: int, is_kept: bool) -> None:
        """Take any message that is on its way; one that is kept comes again."""
        at = which % len(self.to_receiver)
        self._give(self.to_receiver[at] if is_kept else self.to_receiver.pop(at))

    @rule(most=st.integers(1, 20))
    def deliver_in_order(self, most: int) -> None:
        for one in self.to_receiver[:most]:
            self._give(one)
        del self.to_receiver[:most]

    @precondition(lambda self: self.to_receiver)
    @rule(which=which, is_lost=st.booleans())
    def lose_or_damage(self, which: int, is_lost: bool) -> None:
        at = which % len(self.to_receiver)
        if is_lost:
            del self.to_receiver[at]
            return
        one = self.to_receiver[at]
        self.to_receiver[at] = OnTheWay(one.message, (*one.rows[1:], (-1, 0, 0)), is_intact=False)

    @precondition(lambda self: self.to_sender)
    @rule(which=which, is_kept=st.booleans())
    def answer(self, which: int, is_kept: bool) -> None:
        at = which % len(self.to_sender)
        self._hear(self.to_sender[at] if is_kept else self.to_sender.pop(at))

    @rule()
    def answer_in_order(self) -> None:
        for message in self.to_sender:
            self._hear(message)
        self.to_sender.clear()

    @precondition(lambda self: self.to_sender)
    @rule(which=which)
    def lose_answer(self, which: int) -> None:
        del self.to_sender[which % len(self.to_sender)]

    def _hear(self, message: DataMessage) -> None:
        match message:
            case Credit():
                self.sender.credited(message.key, message.generation, message.num_bytes, self.now)
            case Ack():
                self.sender.acked(message.key, message.generation)
            case Reject():
                self.sender.rejected(message)
            case _:
                raise AssertionError(f"a receiver does not say {message}")

    @rule(name=names, what=st.sampled_from(["here", "there", "both", "sender dies", "receiver is said to be dead"]))
    def cancel(self, name: str, what: str) -> None:
        """The router gives an attempt up, and its word reaches one side or both; or a process dies."""
        key = self.key(name)
        if what in ("here", "both"):
            self.sender.abort(key, "cancelled")
        if what in ("there", "both"):  # of a dead sender alone the router knows that it sends no more
            self._execute(self.receiver.cancel(key, key in self.prompts))
        if what == "sender dies":
            self._sender_dies()
        if what == "receiver is said to be dead":
            self.sender.peer_gone()

    def _sender_dies(self) -> None:
        """What it has sent may still arrive; of what was sent to it nothing will."""
        self._start_prompt_worker()
        self.to_sender.clear()

    @rule(name=names)
    def sequence_ends(self, name: str) -> None:
        if self.key(name) in self.running:
            self._end_sequence(self.key(name))

    def _end_sequence(self, key: Key) -> None:
        self.running.remove(key)
        self.there.release(key)

    @rule(name=names, seconds=st.sampled_from([0.0, 0.0, 0.5, 3.0]))
    def time_passes(self, name: str, seconds: float) -> None:
        """The router renews one attempt, then the clock moves on."""
        self.receiver.renew(self.key(name), self.now)
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        self.now += seconds
        self._execute(self.receiver.expire(self.now))

    def _give(self, one: OnTheWay) -> None:
        message = one.message
        is_known = message.key in set(self.receiver.keys())
        is_current = is_known and self.generations[message.key] == message.generation
        match message:
            case KVFrame():
                num_dropped = self.receiver.num_dropped_frames
                commands = self.receiver.frame(message, len(one.rows) * ROW, one.is_intact, self.now)
                is_written = any(isinstance(command, Write) for command in commands)
                assert is_written == (self.receiver.num_dropped_frames == num_dropped), "written or counted as dropped"
            case Done():
                commands = self.receiver.done(message)
            case Cancelled():
                commands = self.receiver.cancelled(message)
            case _:
                raise AssertionError(f"a sender does not say {message}")
        assert is_current or all(isinstance(command, Reply) for command in commands), "a late message did something"
        self._execute(commands, one)

    def _execute(self, commands: list[ReceiverCommand], one: OnTheWay | None = None) -> None:
        for command in commands:
            match command:
                case Write():
                    assert one is not None
                    self._write(command, one)
                case Reply():
                    self.to_sender.append(command.message)
                case Complete():
                    self._complete(command.key)
                case TransferFailed():
                    grant = (command.key, self.generations[command.key])
                    assert grant not in self.failed, "failed twice"
                    self.failed.add(grant)
                case Released():
                    self.there.release(command.key)

    def _write(self, command: Write, one: OnTheWay) -> None:
        holding = self.there.pool.holding(command.key)
        assert holding is not None, "I2: blocks that nobody has"
        assert holding.generation == command.generation == one.message.generation, "I2"
        assert holding.use == "granted", "a frame for a sequence that runs already"
        assert one.is_intact
        cells = [
            cell
            for cell, _ in self.there.places(command.key, self.numbers[command.key], command.layers, command.tokens)
        ]
        self.there.cells.update(zip(cells, one.rows, strict=True))

    def _complete(self, key: Key) -> None:
        grant = (key, self.generations[key])
        assert grant not in self.completed, "completed twice"
        assert grant not in self.failed, "failed, and yet complete"
        for cell, content in self.there.places(key, self.numbers[key], range(3), range(self.lengths[key])):
            assert self.there.cells.get(cell) == content, "a sequence starts from wrong keys and values"
        self.completed.add(grant)
        self.running.add(key)
        self.there.pool.promote(key)

    @invariant()
    def every_block_has_one_owner_and_every_owner_a_deadline(self) -> None:
        self.there.pool.check()
        self.here.pool.check()
        assert set(self.there.pool.owners()) == {*self.receiver.keys(), *self.running}
        assert set(self.prompts) <= set(self.here.pool.owners())
        deadline_s = self.receiver.deadline()
        assert (deadline_s is None) == (not self.receiver.keys())
        assert deadline_s is None or deadline_s <= self.now + LEASE_S

    def teardown(self) -> None:
        """The noise is over: all comes home, by what is still said or at the latest by the leases."""
        for key in list(self.prompts):
            self.sender.abort(key, "over")
        self._send(1000)
        self.deliver_in_order(1000)
        self._wait(LEASE_S)
        for key in list(self.running):
            self._end_sequence(key)
        assert not len(self.sender)
        assert not len(self.receiver)
        assert not self.prompts
        assert self.there.pool.num_free == NUM_BLOCKS
        assert not self.there.cells


LossyLink.TestCase.settings = SHORT
TestLossyLink = LossyLink.TestCase


@pytest.mark.slow
@pytest.mark.timeout(LONG_S)
def test_many_more_lives_over_a_lossy_link() -> None:
    run_state_machine_as_test(LossyLink, settings=LONG)
