"""A data channel without sockets, for the contract that all channels keep: queues in one process."""

from itertools import count

from twinpool.cluster.protocol.mailbox import Mailbox
from twinpool.cluster.protocol.messages import Message
from twinpool.kvtransfer.frames import KVFrame, Received, checksum


class MemoryReceiver:
    """Implements channel.ReceiverEnd."""

    def __init__(self) -> None:
        self.addresses = ()
        self.arrived: Mailbox[Received] = Mailbox()
        self.senders: dict[bytes, Mailbox[Message]] = {}
        self.numbers = count()
        self.is_closed = False
        self._inbox: list[Received] = []

    @property
    def sources(self) -> tuple[int]:
        return (self.arrived.fileno(),)

    def receive(self) -> Received | None:
        self._inbox += self.arrived.drain()
        return self._inbox.pop(0) if self._inbox else None

    def reply(self, peer: bytes, message: Message) -> None:
        if peer in self.senders:
            self.senders[peer].put(message)

    def close(self) -> None:
        self.is_closed = True
        self.arrived.close()


class MemorySender:
    """Implements channel.SenderEnd."""

    def __init__(self, receiver: MemoryReceiver) -> None:
        self._receiver = receiver
        self._peer = next(receiver.numbers).to_bytes(4, "big")
        self._replies: Mailbox[Message] = Mailbox()
        self._inbox: list[Message] = []
        receiver.senders[self._peer] = self._replies

    @property
    def sources(self) -> tuple[int]:
        return (self._replies.fileno(),)

    def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
        if self._receiver.is_closed:
            raise ConnectionError("the receiver is gone")
        is_intact = isinstance(message, KVFrame) and checksum(payload) == message.checksum
        self._receiver.arrived.put(Received(self._peer, message, memoryview(payload), is_intact))

    def receive(self) -> Message | None:
        self._inbox += self._replies.drain()
        return self._inbox.pop(0) if self._inbox else None

    def close(self) -> None:
        del self._receiver.senders[self._peer]
        self._replies.close()
