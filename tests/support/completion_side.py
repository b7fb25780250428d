"""A COMPLETION worker's end of the data channel without the worker: socket, receiver core and a fake cache."""

import time
from dataclasses import dataclass, field

import zmq
from twinpool.cluster.protocol.messages import Message, SamplingParams
from twinpool.engine.fake import FakeEngine
from twinpool.engine.sequence import ScheduledRow, Sequence as EngineSequence
from twinpool.kvtransfer.channel import ReceiverEnd
from twinpool.kvtransfer.frames import Cancelled, Done, KVFrame, Received
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


@dataclass
class CompletionSide:
    """A COMPLETION worker's end: socket, core and cache; it answers while `work` runs."""

    channel: ReceiverEnd
    engine: FakeEngine
    core: Receiver
    tables: dict[Key, list[int]] = field(default_factory=dict[Key, list[int]])
    completed: dict[Key, Done] = field(default_factory=dict[Key, Done])
    failed: dict[Key, str] = field(default_factory=dict[Key, str])
    released: list[Key] = field(default_factory=list[Key])
    received: list[Message] = field(default_factory=list[Message])

    def grant(self, key: Key, generation: int, length: int, table: list[int]) -> None:
        self.tables[key] = table
        self.core.grant(key, generation, range(length), time.monotonic())

    def take_one(self, within_s: float = 10.0) -> Received:
        """Return the next message, unhandled."""
        received = self.take_one_or_none(within_s)
        assert received is not None, "nothing came"
        return received

    def take_one_or_none(self, within_s: float) -> Received | None:
        deadline_s = time.monotonic() + within_s
        while (received := self.channel.receive()) is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            zmq.zmq_poll([(source, zmq.POLLIN) for source in self.channel.sources], int(left_s * 1000) + 1)
        self.received.append(received.message)
        return received

    def work(self, key: Key, within_s: float = 10.0) -> None:
        """Handle messages until the transfer `key` is complete or released."""
        while key not in self.completed and key not in self.released:
            self.take_and_handle(within_s)

    def take_and_handle(self, within_s: float = 10.0) -> Received:
        received = self.take_one(within_s)
        self.handle(received)
        return received

    def handle(self, received: Received) -> None:
        for command in self._commands(received):
            self._execute(command, received)

    def expire(self, now: float) -> None:
        """Let every lease that ends before `now` run out."""
        nobody = Received(b"", Cancelled(request_id="-", attempt=1, generation=1), memoryview(b""), False)
        for command in self.core.expire(now):
            self._execute(command, nobody)

    def _commands(self, received: Received) -> list[ReceiverCommand]:
        now = time.monotonic()
        match received.message:
            case KVFrame():
                return self.core.frame(received.message, received.payload.nbytes, received.is_intact, now)
            case Done():
                return self.core.done(received.message)
            case Cancelled():
                return self.core.cancelled(received.message)
            case _:
                raise AssertionError(f"a sender does not say {received.message}")

    def _execute(self, command: ReceiverCommand, received: Received) -> None:
        match command:
            case Write():
                self.engine.scatter(self.tables[command.key], command.layers, command.tokens, received.payload)
            case Reply():
                self.channel.reply(received.peer, command.message)
            case Complete():
                self.completed[command.key] = command.done
            case TransferFailed():
                self.failed[command.key] = command.reason
            case Released():
                self.released.append(command.key)

    def continue_there(self, key: Key, prompt: list[int], num_tokens: int) -> list[int]:
        """Decode from the KV and the first token that came; return the output tokens."""
        sequence = EngineSequence(*key, list(prompt), len(prompt), SamplingParams(), block_table=self.tables[key])
        sequence.token_ids.append(self.completed[key].token.token)
        sequence.num_computed_tokens = len(prompt)
        while sequence.num_output_tokens < num_tokens:
            (sampled,) = self.engine.step(
                [ScheduledRow(sequence, sequence.num_computed_tokens, len(sequence.token_ids), samples=True)]
            ).sampled
            assert sampled is not None
            sequence.num_computed_tokens = len(sequence.token_ids)
            sequence.token_ids.append(sampled.token)
        return sequence.token_ids[len(prompt) :]
