"""The data channel with payloads through two-rank process groups (NCCL, Gloo), and everything else over ZMQ.

A frame's life here:
1. The sender announces it: its header goes over the data connection, its payload into the outbox.
2. The receiver gets ready for it in a staging buffer of its own (see kvtransfer.staging), then says Go.
3. The sender's end of the communicator sends the payload, the receiver's end takes it and compares the checksum.
4. The receiver passes header and payload on, in the order of the headers: only then are generation and order checked
   by the receiver of transfers, and only then may bytes go into the cache.
Frames that come with their payload, from a sender that uses ZMQ alone, are passed on as well.

Communicators are made when a peer first announces something; the receiver alone decides about their lives. One that
breaks fails the transfers over it, and the next frame gets a new one.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from ..cluster.protocol.mailbox import Mailbox
from ..cluster.protocol.messages import Message
from .channel import Source
from .communicator import Broken, Communicator, CommunicatorSettings, Exchanged, Landed, Posted, Report
from .frames import Announce, Exchange, Go, Join, KVFrame, Leave, Received
from .outbox import Outbox
from .process_groups import RECEIVER_RANK, SENDER_RANK
from .staging import Build, Deliver, Drop, Post, Staging, StagingCommand, StagingLimits
from .zmq_channel import ZmqReceiver, ZmqSender

log = logging.getLogger(__name__)


class CollectiveSender:
    """Implements channel.SenderEnd over `connection`, which it owns."""

    def __init__(
        self,
        connection: ZmqSender,
        settings: CommunicatorSettings,
        max_announced_bytes: int,
        on_closed: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._on_closed = on_closed
        self._outbox = Outbox(max_announced_bytes)
        self._reports: Mailbox[Report] = Mailbox()
        self._replies: deque[Message] = deque()
        self._communicator: Communicator | None = None
        self._left: list[Communicator] = []

    @property
    def sources(self) -> tuple[Source, ...]:
        return (*self._connection.sources, self._reports.fileno())

    def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
        if not isinstance(message, KVFrame):
            self._connection.send(message)
            return
        self._wait_for_room(message.num_bytes)
        frame = Announce(**message.model_dump())
        self._connection.send(frame)
        self._outbox.announce(frame, memoryview(payload))

    def receive(self) -> Message | None:
        self._take_in()
        return self._replies.popleft() if self._replies else None

    def close(self) -> None:
        self._leave()
        freed = [communicator.is_freed(self._settings.free_s) for communicator in self._left]
        self._connection.close()
        if all(freed):
            self._reports.close()  # else a thread may still write to it
        self._on_closed()

    def _wait_for_room(self, num_bytes: int) -> None:
        deadline_s = time.monotonic() + self._settings.wait_s
        while not self._outbox.has_room(num_bytes):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ConnectionError(f"{self._connection.address} asks for no payload")  # and what is out stays there
            zmq.zmq_poll([(source, zmq.POLLIN) for source in self.sources], int(left_s * 1000) + 1)
            self._take_in()

    def _take_in(self) -> None:
        for report in self._reports.drain():
            self._handle_report(report)
        while (message := self._connection.receive()) is not None:
            self._handle_message(message)
        self._left = [communicator for communicator in self._left if not communicator.is_freed()]

    def _handle_report(self, report: Report) -> None:
        if self._communicator is None or report.communicator != self._communicator.number:
            return
        match report:
            case Exchanged():
                self._connection.send(Exchange(communicator=report.communicator, name=report.name, value=report.value))
            case Broken():
                raise ConnectionError(f"{self._settings.way} to {self._connection.address} broke: {report.reason}")
            case Posted() | Landed():
                raise AssertionError("a sender does not receive")

    def _handle_message(self, message: Message) -> None:
        current = self._communicator
        match message:
            case Join():
                self._join(message)
            case Exchange() if current is not None and message.communicator == current.number:
                current.put(message.name, message.value)
            case Go() if current is not None and message.communicator == current.number:
                payload = self._outbox.go(message)
                if payload is None:
                    raise ConnectionError(f"{self._connection.address} asks for a frame that was not announced")
                current.send(payload)
            case Leave() if current is not None and message.communicator == current.number:
                self._leave()
            case Exchange() | Go() | Leave():
                pass  # about a communicator that we have left
            case _:
                self._replies.append(message)

    def _join(self, message: Join) -> None:
        if message.transport != self._settings.way:
            raise ConnectionError(
                f"{self._connection.address} uses {message.transport!r}, this worker {self._settings.way!r}"
            )
        self._leave()
        self._communicator = Communicator(message.communicator, SENDER_RANK, self._settings, self._reports.put)

    def _leave(self) -> None:
        if self._communicator is not None:
            self._communicator.leave()
            self._left.append(self._communicator)
            self._communicator = None


@dataclass(frozen=True)
class Outgoing:
    peer: bytes
    message: Message


@dataclass(frozen=True)
class Taken:
    num_bytes: int


@dataclass(frozen=True)
class Stop:
    pass


Event = Report | Outgoing | Taken | Stop


class CollectiveReceiver:
    """Implements channel.ReceiverEnd over `ends`, which it owns, with a thread that never waits for the engine."""

    def __init__(
        self,
        ends: ZmqReceiver,
        offers: Sequence[str],
        settings: CommunicatorSettings,
        staging: StagingLimits,
    ) -> None:
        self.addresses = (*ends.addresses, *offers)
        self._ends = ends
        self._settings = settings
        self._staging = Staging(staging)
        self._communicators: dict[int, Communicator] = {}
        self._peers: dict[int, bytes] = {}
        self._left: list[Communicator] = []
        self._events: Mailbox[Event] = Mailbox()
        self._delivered: Mailbox[Received] = Mailbox()
        self._inbox: deque[Received] = deque()  # the engine loop's
        self._failure: Exception | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="receive-kv", daemon=True)
        self._thread.start()

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self._delivered.fileno(),)

    def receive(self) -> Received | None:
        if not self._inbox:
            self._inbox.extend(self._delivered.drain())
        if self._failure is not None:
            raise self._failure
        if not self._inbox:
            return None
        received = self._inbox.popleft()
        if received.payload.nbytes:
            self._events.put(Taken(received.payload.nbytes))
        return received

    def reply(self, peer: bytes, message: Message) -> None:
        self._events.put(Outgoing(peer, message))

    def close(self) -> None:
        self._events.put(Stop())
        self._thread.join()
        freed = [communicator.is_freed(self._settings.free_s) for communicator in self._left]
        if all(freed):
            self._events.close()  # else a thread may still write to it
        self._delivered.close()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._wait()
                for event in self._events.drain():
                    self._execute(self._handle(event))
                self._take_messages()
                self._execute(self._staging.tick(time.monotonic()))
                self._left = [communicator for communicator in self._left if not communicator.is_freed()]
        except Exception as error:
            self._failure = error  # the engine loop's to raise
        finally:
            for number in list(self._communicators):
                self._leave(number)
            self._ends.close()

    def _wait(self) -> None:
        """Wait for events, messages or a deadline; for messages only while there is room to stage what they bring."""
        deadline_s = self._staging.deadline()
        timeout_s = 1.0 if deadline_s is None else min(1.0, max(0.0, deadline_s - time.monotonic()))
        sources = [self._events.fileno(), *(() if self._staging.is_full else self._ends.sources)]
        zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], int(timeout_s * 1000) + 1)

    def _take_messages(self) -> None:
        while not self._staging.is_full and (received := self._ends.receive()) is not None:
            if isinstance(received.message, Exchange):
                self._exchange(received.peer, received.message)
            else:
                self._execute(self._staging.arrived(received, time.monotonic()))

    def _exchange(self, peer: bytes, message: Exchange) -> None:
        if self._peers.get(message.communicator) == peer:
            self._communicators[message.communicator].put(message.name, message.value)

    def _handle(self, event: Event) -> list[StagingCommand]:
        now = time.monotonic()
        match event:
            case Outgoing():
                self._ends.reply(event.peer, event.message)
            case Taken():
                return self._staging.taken(event.num_bytes, now)
            case Exchanged():
                message = Exchange(communicator=event.communicator, name=event.name, value=event.value)
                self._tell(event.communicator, message)
            case Posted():
                self._tell(event.communicator, _go(event))
                return self._staging.posted(event.communicator, now)
            case Landed():
                return self._staging.landed(event.communicator, event.payload, event.is_intact, now)
            case Broken():
                return self._staging.broken(event.communicator, event.reason, now)
            case Stop():
                self._is_stopping = True
        return []

    def _execute(self, commands: list[StagingCommand]) -> None:
        for command in commands:
            match command:
                case Deliver():
                    self._delivered.put(command.received)
                case Post():
                    self._communicators[command.communicator].post(command.frame)
                case Build():
                    self._build(command)
                case Drop():
                    log.info("%s communicator %d is left: %s", self._settings.way, command.communicator, command.reason)
                    self._tell(command.communicator, Leave(communicator=command.communicator))
                    self._leave(command.communicator)

    def _build(self, command: Build) -> None:
        self._peers[command.communicator] = command.peer
        self._tell(command.communicator, Join(communicator=command.communicator, transport=self._settings.way))
        self._communicators[command.communicator] = Communicator(
            command.communicator, RECEIVER_RANK, self._settings, self._events.put
        )

    def _tell(self, communicator: int, message: Message) -> None:
        if communicator in self._peers:
            self._ends.reply(self._peers[communicator], message)

    def _leave(self, number: int) -> None:
        communicator = self._communicators.pop(number)
        del self._peers[number]
        communicator.leave()
        self._left.append(communicator)


def _go(posted: Posted) -> Go:
    frame = posted.frame
    return Go(
        request_id=frame.request_id,
        attempt=frame.attempt,
        generation=frame.generation,
        communicator=posted.communicator,
        sequence=frame.sequence,
    )
