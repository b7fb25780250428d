"""The router's control socket: one ROUTER that all workers connect to. The workers' twin is cluster/protocol/link.py.

With keys only workers whose key is allowed get in, and each speaks for itself: the key that the gate saw must be one of
the name that a message comes under, and of the role in its Hello. Knows messages and sockets, not what they mean. A
malformed message is counted and dropped; it never raises into the loop.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import zmq

from ..cluster.protocol.codec import FROM_WORKER, MAX_BODY_BYTES, decode, encode
from ..cluster.protocol.curve import Gate, holder_of, is_local
from ..cluster.protocol.errors import ConfigError, ProtocolError, VersionError
from ..cluster.protocol.identity import WorkerId
from ..cluster.protocol.keys import KeyRing, role_of
from ..cluster.protocol.link import HEARTBEAT_SUFFIX
from ..cluster.protocol.messages import Hello, Message, Refused
from ..cluster.protocol.parts import receive_parts

log = logging.getLogger(__name__)

MAX_PARTS = 3  # identity, body, tokens
MAX_IDENTITIES = 1000
MAX_UNREACHABLE = 1000

NAMED_BY_ZMQ = b"\0"

Deliver = Callable[[WorkerId, Message], None]


class ImpostorError(ProtocolError):
    """A worker speaks under a name or a role that its key does not bear."""


class RouterLink:
    def __init__(self, address: str, keys: KeyRing | None = None) -> None:
        """Bind `address`. Raises ConfigError when that is impossible, or would be open to machines without a key."""
        if keys is None and not is_local(address):
            raise ConfigError(
                f"--control {address} is not a loopback or ipc address",
                hint="other machines may connect only with keys: `twinpool keys FOLDER`, then --keys FOLDER",
            )
        self._keys = keys
        self._identities: dict[WorkerId, bytes] = {}  # where messages for a worker go, by when it was heard last
        self.num_malformed = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Deliver | None = None
        self._is_due = False  # a look at the socket is scheduled
        self._unreachable: set[WorkerId] = set()  # of these the log knows
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A worker that connects again before we have noticed its old connection's end would else be heard no more.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 10000)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
        self._gate: Gate | None = None
        if keys is not None:
            self._gate = Gate(self._context, keys.admitted("prompt", "completion"))
            self._gate.guard(self._socket, keys.own)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot bind the control socket {address}: {error}") from error

    def listen(self, deliver: Deliver) -> None:
        """From now on hand each well-formed message to `deliver`, on the running event loop."""
        self._loop, self._deliver = asyncio.get_running_loop(), deliver
        self._loop.add_reader(self._socket.FD, self._look_soon)
        self._look_soon()  # at what came before

    def send(self, worker: WorkerId, message: Message) -> None:
        """Hand `message` to ZMQ, at once. A worker that is not connected is no error here: membership will notice."""
        try:
            identity = self._identities.get(worker, str(worker).encode())
            self._socket.send_multipart([identity, *encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._note_unsent(worker, message, error)
        # Whatever touches the socket takes the one signal that ZMQ gives for messages that have just arrived.
        if self._deliver is not None and cast(int, self._socket.EVENTS) & zmq.POLLIN:
            self._look_soon()

    def has_lost_connection(self) -> bool:
        """True when some connection has closed since the last call; ZMQ does not say whose."""
        has_lost = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            has_lost = True
        return has_lost

    def check(self) -> None:
        """Raise RuntimeError when keys can no longer be checked."""
        if self._gate is not None:
            self._gate.check()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
        self._deliver = None
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _look_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            assert self._loop is not None, "nobody listens yet"
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Take one message, and come back for the next: between two of them everything else gets a turn."""
        self._is_due = False
        if self._deliver is None:
            return  # closed meanwhile
        try:
            parts = receive_parts(self._socket, MAX_PARTS)
        except zmq.Again:
            return
        self._look_soon()
        received = self._read(parts)
        if received is not None:
            self._deliver(*received)

    def _read(self, parts: list[zmq.Frame]) -> tuple[WorkerId, Message] | None:
        identity, *frames = (part.bytes for part in parts)
        if identity.startswith(NAMED_BY_ZMQ) and _is_well_formed(frames):
            return None  # the last that a connection brought whose worker has made a new one
        try:
            name = identity.decode() if self._keys is None else identity.decode().rpartition("/")[0]
            worker = WorkerId.parse(name.removesuffix(HEARTBEAT_SUFFIX))
            self._check_name(worker, parts[-1])
            message = decode(frames, FROM_WORKER)
            self._check_role(worker, message)
            if not name.endswith(HEARTBEAT_SUFFIX):
                self._note_identity(worker, identity)
            return worker, message
        except ImpostorError as error:
            self._refuse(identity, str(error))
            self._count_malformed(identity, error)
        except ProtocolError as error:
            self._count_malformed(identity, error)
            if isinstance(error, VersionError):
                self._refuse(identity, f"this worker speaks {error}")
        except ValueError as error:
            self._count_malformed(identity, error)
        return None

    def _note_identity(self, worker: WorkerId, identity: bytes) -> None:
        """With keys an identity ends in a secret of the worker's; the first that it came with stays its own."""
        if self._keys is not None:
            known = self._identities.pop(worker, identity)
            if len(self._identities) >= MAX_IDENTITIES:
                del self._identities[next(iter(self._identities))]  # silent for longest
            self._identities[worker] = known

    def _check_name(self, worker: WorkerId, part: zmq.Frame) -> None:
        if self._keys is not None and not self._keys.speaks_for(holder_of(part), worker.name):
            raise ImpostorError(f"the key of {holder_of(part)} does not speak for {worker.name[:64]!r}")

    def _check_role(self, worker: WorkerId, message: Message) -> None:
        if self._keys is not None and isinstance(message, Hello) and message.role.lower() != role_of(worker.name):
            raise ImpostorError(f"{worker.name} says that it is a {message.role} worker")

    def _refuse(self, identity: bytes, reason: str) -> None:
        """Answer on the very connection that the message came over: whose name it bears may be somebody else."""
        try:
            self._socket.send_multipart([identity, *encode(Refused(reason=reason))], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("Refused for %r not sent: %s", identity[:64], error)

    def _note_unsent(self, worker: WorkerId, message: Message, error: zmq.ZMQError) -> None:
        """Log it once for each incarnation: a dead one's backlog is answered message by message."""
        if worker not in self._unreachable:
            log.info("%s for %s not sent: %s; later ones are not logged", type(message).__name__, worker, error)
            if len(self._unreachable) >= MAX_UNREACHABLE:
                self._unreachable.clear()
            self._unreachable.add(worker)

    def _count_malformed(self, identity: bytes, error: Exception) -> None:
        self.num_malformed += 1
        log.warning("dropped a message of %r: %s", identity[:64], error)


def _is_well_formed(frames: list[bytes]) -> bool:
    try:
        decode(frames, FROM_WORKER)
    except ProtocolError:
        return False
    return True
