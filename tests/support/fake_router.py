"""A plain ROUTER socket in the router's place, for what a worker says and is told."""

import zmq
from twinpool.cluster.protocol.codec import FROM_WORKER, decode, encode
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import Message

Context = zmq.Context[zmq.Socket[bytes]]


class FakeRouter:
    """Reads what workers say; a heartbeat connection is another peer than its worker's own."""

    def __init__(self, context: Context, address: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(address)

    def receive(self, kind: type[Message]) -> tuple[str, Message]:
        """Return the next message of that kind and who sent it; others are skipped."""
        while True:
            assert self.socket.poll(10_000), f"no {kind.__name__} came"
            identity, *frames = self.socket.recv_multipart()
            message = decode(frames, FROM_WORKER)
            if isinstance(message, kind):
                return identity.decode(), message

    def send(self, worker: WorkerId, *messages: Message) -> None:
        for message in messages:
            self.socket.send_multipart([str(worker).encode(), *encode(message)])
