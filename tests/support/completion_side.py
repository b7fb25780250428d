"""A COMPLETION worker's end of the data channel without the worker: socket, receiver core and a fake cache."""

import time
from dataclasses import dataclass, field, replace

import zmq
from twinpool.cluster.protocol.messages import Message
from twinpool.engine.fake import FakeEngine
from twinpool.kvtransfer.channel import Received, ReceiverEnd
from twinpool.kvtransfer.frames import Cancelled, Done, KVFrame, checksum
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
    damage_next_payload: bool = False  # as a fault of memory or wire would

    def grant(self, key: Key, generation: int, length: int, table: list[int]) -> None:
        self.tables[key] = table
        self.core.grant(key, generation, range(length), time.monotonic())

    def take_one(self, within_s: float = 10.0) -> Received:
        """Return the next message, unhandled."""
        deadline_s = time.monotonic() + within_s
        while (received := self.channel.receive()) is None:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, "nothing came"
            zmq.zmq_poll([(source, zmq.POLLIN) for source in self.channel.sources], int(left_s * 1000) + 1)
        self.received.append(received.message)
        return received

    def work(self, key: Key, within_s: float = 10.0) -> None:
        """Handle messages until the transfer `key` is complete or released."""
        while key not in self.completed and key not in self.released:
            self.take_and_handle(within_s)

    def take_and_handle(self, within_s: float = 10.0) -> Received:
        received = self.take_one(within_s)
        if self.damage_next_payload and isinstance(received.message, KVFrame):
            self.damage_next_payload = False
            damaged = bytes([received.payload[0] ^ 1]) + bytes(received.payload[1:])
            is_intact = checksum(damaged) == received.message.checksum
            received = replace(received, payload=memoryview(damaged), is_intact=is_intact)
        for command in self._handle(received):
            self._execute(command, received)
        return received

    def _handle(self, received: Received) -> list[ReceiverCommand]:
        now = time.monotonic()
        match received.message:
            case KVFrame():
                return self.core.frame(received.message, received.payload.nbytes, received.is_intact, now)
            case Done():
                return self.core.done(received.message, now)
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
