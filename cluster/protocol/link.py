"""A worker's control connection to the router: one DEALER for the engine loop, one for the heartbeat thread.

The router's twin is router/link.py. Knows messages and sockets, not what they mean for an engine. ZMQ reconnects by
itself; a router that does not know us (it restarted, or had declared us dead) says Introduce, and we come back as a new
incarnation with new sockets, so that no reply meant for the old one can reach us.
"""

import logging
import secrets
import threading
from collections.abc import Callable

import zmq

from ..config import LivenessSpec
from .codec import FROM_ROUTER, MAX_TOKEN_FRAME_BYTES, decode, encode
from .curve import is_local, use_curve
from .errors import ConfigError, ProtocolError, VersionError
from .identity import WorkerId, new_incarnation
from .keys import KeyRing
from .messages import Heartbeat, Hello, Introduce, Message, Refused, Welcome
from .parts import receive_parts

log = logging.getLogger(__name__)

MAX_PARTS = 2  # body, tokens
HELLO_AGAIN_S = 2.0
REFUSED_AGAIN_S = 30.0  # another router may have come in the place of the one that refused us
HEARTBEAT_SUFFIX = "/heartbeat"


class WorkerLink:
    """Used by one thread, the engine loop; only `beat` is called from the heartbeat thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        hello: Hello,
        name: str,
        liveness: LivenessSpec,
        beat: Callable[[], Heartbeat],
        keys: KeyRing | None = None,
    ) -> None:
        """Connect. Raises ConfigError when the router is on another machine and there are no keys."""
        if keys is None and not is_local(address):
            raise ConfigError(
                f"--control {address} is on another machine",
                hint="which may be spoken to only with keys: `twinpool keys FOLDER`, then --keys FOLDER",
            )
        self._router = None if keys is None else keys.towards("router")
        if self._router is not None and not self._router.allowed:
            raise ConfigError("no public key of the router is known", hint="it belongs into allowed/router.pub")
        self._num_tried_keys = 0
        # Whoever knows a connection's identity can have it handed over to him, and names are known to other workers.
        self._secret = "" if keys is None else f"/{secrets.token_hex(16)}"
        self._context = context
        self._hello = hello
        self._heartbeat_s = liveness.heartbeat_s
        self._beat = beat
        self.worker = WorkerId(name, new_incarnation())
        self.address = address
        self.router_incarnation: str | None = None  # of the router that welcomed us last
        self.is_refused = False  # the latest answer to our Hello
        self._hello_sent_s = 0.0
        self._joined = threading.Event()
        self._closing = threading.Event()
        self.socket = self._connect(str(self.worker))
        self._thread = threading.Thread(target=self._heartbeat_loop, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def is_joined(self) -> bool:
        return self._joined.is_set()

    def say_hello(self, now: float) -> None:
        """Say Hello, and again every two seconds until the router answers; much later when it refuses us."""
        again_s = REFUSED_AGAIN_S if self.is_refused else HELLO_AGAIN_S
        if not self._joined.is_set() and now - self._hello_sent_s >= again_s:
            if self._hello_sent_s and not self.is_refused:
                self._try_next_key()
            self._hello_sent_s = now
            self.send(self._hello)

    def send(self, message: Message) -> None:
        """Hand `message` to ZMQ. A full queue means a router that has been away for long: it will say Introduce."""
        try:
            self.socket.send_multipart(encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the router takes no messages; dropped one %s", type(message).__name__)

    def receive(self) -> Message | None:
        """Return the next message, or None. Introduce and a new router's Welcome mean: drop all you hold.

        Raises RuntimeError when the heartbeat thread has died: the router takes us for dead, so we had better be.
        """
        if not self._thread.is_alive():
            raise RuntimeError("the heartbeat thread died; its traceback is above in the log")
        while True:
            try:
                frames = [part.bytes for part in receive_parts(self.socket, MAX_PARTS)]
            except zmq.Again:
                return None
            try:
                message = decode(frames, FROM_ROUTER)
            except VersionError as error:
                message = Refused(reason=f"the router speaks {error}")
            except ProtocolError as error:
                log.warning("ignored a message of the router: %s", error)
                continue
            if isinstance(message, Introduce) and not self._joined.is_set():
                continue  # we are about to say Hello anyway
            if isinstance(message, Introduce):
                self._rejoin()
            if isinstance(message, Refused):
                self.is_refused = True
                self._joined.clear()
            if isinstance(message, Welcome):
                self.is_refused = False
                self._joined.set()
            return message

    def is_new_router(self, welcome: Welcome) -> bool:
        """True when this Welcome comes from another router process than the one before."""
        known, self.router_incarnation = self.router_incarnation, welcome.router_incarnation
        return known is not None and known != welcome.router_incarnation

    def close(self) -> None:
        self._closing.set()
        self._joined.set()
        self._thread.join()
        self.socket.close(linger=500)

    def _rejoin(self) -> None:
        self._joined.clear()
        self.socket.close(linger=0)
        self.worker = WorkerId(self.worker.name, new_incarnation())
        self.socket = self._connect(str(self.worker))
        self._hello_sent_s = 0.0
        log.info("the router does not know us any more; joining again as %s", self.worker)

    def _try_next_key(self) -> None:
        """The router may have another one of the keys that are allowed, while they are being changed."""
        if self._router is not None and len(self._router.allowed) > 1:
            self._num_tried_keys += 1
            self.socket.close(linger=0)
            self.socket = self._connect(str(self.worker))

    def _connect(self, identity: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, (identity + self._secret).encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_TOKEN_FRAME_BYTES)
        if self._router is not None:
            use_curve(socket, self._router.own, self._router.allowed[self._num_tried_keys % len(self._router.allowed)])
        socket.connect(self.address)
        return socket

    def _heartbeat_loop(self) -> None:
        """Beat while joined; a socket of this thread's own, named after the incarnation it speaks for."""
        while not self._closing.is_set():
            self._joined.wait()
            worker = self.worker
            socket = self._connect(str(worker) + HEARTBEAT_SUFFIX)
            while self._joined.is_set() and worker == self.worker and not self._closing.is_set():
                if socket.poll(0, zmq.POLLOUT):
                    socket.send_multipart(encode(self._beat()), flags=zmq.NOBLOCK)
                self._closing.wait(self._heartbeat_s)
            socket.close(linger=0)
