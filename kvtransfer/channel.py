"""What a channel's two ends are to the workers, and the thread that sends over one while the engine computes.

SenderThread is the shell around kvtransfer.sender for one PROMPT worker's transfers to one COMPLETION worker: it owns
the connection, gathers rows when credits allow, and tells the worker's loop through `on_closed` how each transfer
ended. The engine loop calls the public methods; they never wait.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol

import zmq

from ..cluster.protocol.mailbox import Mailbox
from ..cluster.protocol.messages import Message
from .frames import Ack, Credit, KVFrame, Received, Reject, checksum
from .layout import KVLayout
from .sender import Closed, FirstOutput, Key, Sender, SenderCommand, SenderLimits, SendFrame, SendMessage

log = logging.getLogger(__name__)

Gather = Callable[[Sequence[int], range, range], memoryview]  # block table, layers, tokens → [layers, 2, tokens, row]
Source = zmq.Socket[bytes] | int  # a socket or a file descriptor, to poll for reading


class SenderEnd(Protocol):
    """One ordered connection to one COMPLETION worker; used by one thread."""

    @property
    def sources(self) -> Sequence[Source]:
        """What becomes readable when there may be a reply."""
        ...

    def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
        """Send a header and its payload, which nobody writes into afterwards.

        Raises TimeoutError when the peer takes nothing for long, ConnectionError when nothing more can be sent.
        """
        ...

    def receive(self) -> Message | None:
        """Return the next well-formed reply, or None when there is none now. Raises ConnectionError."""
        ...

    def close(self) -> None: ...


class ReceiverEnd(Protocol):
    """Where all PROMPT workers' connections to one COMPLETION worker end; used by one thread."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it can be reached, and how."""
        ...

    @property
    def sources(self) -> Sequence[Source]:
        """What becomes readable when there may be a message."""
        ...

    def receive(self) -> Received | None:
        """Return the next well-formed message, in the order that its peer sent it, or None when there is none now."""
        ...

    def reply(self, peer: bytes, message: Message) -> None:
        """Answer `peer`; one that is gone or does not read is not waited for: its lease will run out."""
        ...

    def close(self) -> None: ...


class SenderThread:
    def __init__(
        self,
        open_connection: Callable[[], SenderEnd],
        layout: KVLayout,
        limits: SenderLimits,
        gather: Gather,
        on_closed: Callable[[Closed], None],
        name: str,
    ) -> None:
        self._open_connection = open_connection
        self._layout = layout
        self._gather = gather
        self._on_closed = on_closed
        self._sender = Sender(layout, limits)
        self._tables: dict[Key, Sequence[int]] = {}
        self._events: Mailbox[Callable[[], None]] = Mailbox()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"send-to-{name}", daemon=True)
        self._thread.start()

    def open(
        self,
        key: Key,
        generation: int,
        credit_bytes: int,
        first_token: int,
        block_table: Sequence[int],
        arrived_tokens: Sequence[int] = (),
    ) -> None:
        """Begin a transfer; its blocks must stay untouched until `on_closed`."""

        def start() -> None:
            self._tables[key] = block_table
            self._sender.open(key, generation, credit_bytes, first_token, arrived_tokens)

        self._events.put(start)

    def layer_written(self, key: Key, layer: int, tokens: range) -> None:
        self._events.put(lambda: self._sender.layer_written(key, layer, tokens))

    def finish(self, key: Key, first_output: FirstOutput) -> None:
        self._events.put(lambda: self._sender.finish(key, first_output))

    def abort(self, key: Key, reason: str, is_finished: bool = False) -> None:
        self._events.put(lambda: self._sender.abort(key, reason, is_finished))

    def num_arrived_bytes(self, key: Key) -> int:
        """KV bytes of `key` that the peer has confirmed."""
        return self._sender.num_arrived_bytes(key)

    def stop(self, wait_s: float = 2.0) -> None:
        """The peer is gone or we are ending: every open transfer fails, the connection closes, the thread ends.

        Stopping twice is fine.
        """

        def end() -> None:
            self._is_stopping = True

        if self._thread.is_alive():
            self._events.put(end)
            self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._serve()
        finally:
            self._fail_all()
            self._events.close()

    def _serve(self) -> None:
        """Work over one connection, opened when there is something to do, until we stop or it breaks."""
        zmq.zmq_poll([(self._events.fileno(), zmq.POLLIN)], -1)
        try:
            with closing(self._open_connection()) as connection:
                poller = zmq.Poller()
                for source in (*connection.sources, self._events.fileno()):
                    poller.register(source, zmq.POLLIN)
                while not self._is_stopping:
                    self._work(connection, poller)
        except Exception:
            log.exception("the connection is given up, and every transfer over it; the next transfer gets a new one")
            self._take_events()
            self._fail_all()

    def _work(self, connection: SenderEnd, poller: zmq.Poller) -> None:
        self._take_events()
        if self._is_stopping:
            return  # without another wait
        self._take_replies(connection)
        command = self._sender.next_command(time.monotonic())
        if command is None:
            poller.poll(self._wait_ms())
            return
        try:
            self._execute(connection, command)
        except TimeoutError as error:
            log.warning("giving up the transfers: %s", error)
            self._fail_all()

    def _take_events(self) -> None:
        for event in self._events.drain():
            event()

    def _execute(self, connection: SenderEnd, command: SenderCommand) -> None:
        match command:
            case SendFrame():
                self._send_frame(connection, command)
            case SendMessage():
                connection.send(command.message)
            case Closed():
                del self._tables[command.key]
                self._on_closed(command)

    def _send_frame(self, connection: SenderEnd, command: SendFrame) -> None:
        payload = self._gather(self._tables[command.key], command.layers, command.tokens)
        frame_checksum = checksum(payload)
        frame = KVFrame(
            request_id=command.key[0],
            attempt=command.key[1],
            generation=command.generation,
            layout=self._layout.fingerprint,
            sequence=command.sequence,
            layer_start=command.layers.start,
            layer_end=command.layers.stop,
            token_start=command.tokens.start,
            token_end=command.tokens.stop,
            num_bytes=payload.nbytes,
            checksum=frame_checksum,
        )
        connection.send(frame, payload)
        self._sender.frame_sent(command.key, payload.nbytes, frame_checksum)

    def _take_replies(self, connection: SenderEnd) -> None:
        while (message := connection.receive()) is not None:
            match message:
                case Credit():
                    self._sender.credited(message.key, message.generation, message.num_bytes, time.monotonic())
                case Ack():
                    self._sender.acked(message.key, message.generation)
                case Reject():
                    self._sender.rejected(message)
                case _:
                    log.warning("ignored a %s", type(message).__name__)

    def _fail_all(self) -> None:
        self._sender.peer_gone()
        while isinstance(command := self._sender.next_command(time.monotonic()), Closed):
            del self._tables[command.key]
            self._on_closed(command)

    def _wait_ms(self) -> int:
        deadline = self._sender.deadline()
        return 1000 if deadline is None else int(max(0.0, deadline - time.monotonic()) * 1000) + 1
