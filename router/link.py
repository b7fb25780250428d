"""The router's control socket: one ROUTER that all workers connect to. The workers' twin is cluster/protocol/link.py.

Knows messages and sockets, not what they mean. A malformed message is counted and dropped; it never raises into the
loop.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import cast

import zmq
import zmq.asyncio

from ..cluster.protocol.codec import FROM_WORKER, MAX_BODY_BYTES, decode, encode
from ..cluster.protocol.errors import ConfigError, ProtocolError, VersionError
from ..cluster.protocol.identity import WorkerId
from ..cluster.protocol.link import HEARTBEAT_SUFFIX
from ..cluster.protocol.messages import Message, Refused

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FromWorkerMessage:
    worker: WorkerId
    message: Message


class RouterLink:
    def __init__(self, address: str) -> None:
        """Bind `address`. Raises ConfigError when that is impossible, or would be open to other machines."""
        if not address.startswith(("ipc://", "tcp://127.0.0.1:", "inproc://")):
            raise ConfigError(
                f"--control {address} is not a loopback or ipc address",
                hint="other machines may connect only with keys, which this version does not have",
            )
        self.num_malformed = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 10000)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot bind the control socket {address}: {error}") from error

    async def receive(self) -> FromWorkerMessage:
        """Return the next well-formed message; between two of them everything else gets a turn."""
        while True:
            await asyncio.sleep(0)  # a message that is there already would be taken without one
            identity, *frames = await self._socket.recv_multipart()
            try:
                worker = WorkerId.parse(identity.decode().removesuffix(HEARTBEAT_SUFFIX))
            except ValueError as error:
                self._count_malformed(identity, error)
                continue
            try:
                return FromWorkerMessage(worker, decode(frames, FROM_WORKER))
            except ProtocolError as error:
                self._count_malformed(identity, error)
                if isinstance(error, VersionError):
                    self.send(worker, Refused(reason=f"this worker speaks {error}"))

    def send(self, worker: WorkerId, message: Message) -> None:
        """Hand `message` to ZMQ, at once. A worker that is not connected is no error here: membership will notice."""
        # The asyncio socket's own send, which never waits: sending by its plain socket would take the one signal that
        # ZMQ gives for a message that has just arrived, and whoever waits in `receive` would sleep on.
        frames = [str(worker).encode(), *encode(message)]
        sent = cast(asyncio.Future[None], self._socket.send_multipart(frames, zmq.NOBLOCK))
        error = sent.exception()
        if isinstance(error, zmq.ZMQError):
            log.info("%s for %s not sent: %s", type(message).__name__, worker, error)
        elif error is not None:
            raise error

    def _count_malformed(self, identity: bytes, error: Exception) -> None:
        self.num_malformed += 1
        log.warning("dropped a message of %r: %s", identity[:64], error)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
