"""CURVE on sockets: encryption, and a gate that lets in whoever has an allowed key and nobody else.

The gate is a ZAP handler (RFC 27): libzmq asks it about every client before the first message passes, and marks what
that client sends with the holder of its key (`User-Id`). It fails closed: a guarded socket without a living handler
lets nobody in. A socket is guarded before it is bound. Knows keys and sockets, not what is said over them.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

import zmq
from zmq.utils import z85

from .keys import KeyPair
from .mailbox import Mailbox

log = logging.getLogger(__name__)

HANDLER_ADDRESS = "inproc://zeromq.zap.01"  # libzmq looks for the handler of a context there
DOMAIN = b"twinpool"
VERSION = b"1.0"
NUM_REQUEST_PARTS = 7
LOG_PAUSE_S = 1.0  # strangers must not fill the log
LOCAL_PREFIXES = ("ipc://", "inproc://", "tcp://127.0.0.1:", "tcp://localhost:")

Context = zmq.Context[zmq.Socket[bytes]]


def is_local(address: str) -> bool:
    """Return whether only this machine can be at the other end of `address`."""
    return address.startswith(LOCAL_PREFIXES)


def holder_of(part: zmq.Frame) -> str:
    """Return whose key the sender of this part has, as the gate found."""
    return str(part.get("User-Id"))


def use_curve(socket: zmq.Socket[bytes], own: KeyPair, server_key: bytes) -> None:
    """Make a socket that has not connected yet speak to the holder of `server_key` only."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)


class Gate:
    """The handler of one context, in a thread of its own. Close the guarded sockets first, then the gate."""

    def __init__(self, context: Context, admitted: Mapping[bytes, str]) -> None:
        """Begin to answer; `admitted` says whose key each public key is."""
        self._admitted = {z85.decode(key): holder for key, holder in admitted.items()}
        self._stopping: Mailbox[None] = Mailbox()
        self._num_refused = 0
        self._logged_s = 0.0
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(HANDLER_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def guard(self, socket: zmq.Socket[bytes], own: KeyPair) -> None:
        """Make a socket that is not bound yet a CURVE server whose clients this gate lets in."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it a missing handler would let everybody in

    def check(self) -> None:
        """Raise RuntimeError when the handler has died: nobody is let in any more, so this process is of no use."""
        if not self._thread.is_alive():
            raise RuntimeError("the thread that checks keys died; its traceback is above in the log")

    def close(self) -> None:
        if self._thread.is_alive():
            self._stopping.put(None)
            self._thread.join()
        self._stopping.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopping.fileno(), zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stopping.fileno() in ready:
                    return
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        finally:
            self._socket.close()

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Return the reply to one question of libzmq: status 200 and the holder, or 400."""
        request_id = request[1] if len(request) > 1 else b""
        holder = None
        if len(request) == NUM_REQUEST_PARTS:
            version, _, domain, _, _, mechanism, key = request
            if (version, domain, mechanism) == (VERSION, DOMAIN, b"CURVE"):
                holder = self._admitted.get(key)
        if holder is not None:
            return [VERSION, request_id, b"200", b"OK", holder.encode(), b""]
        self._log_refusal(request[3] if len(request) > 3 else b"?")
        return [VERSION, request_id, b"400", b"not an allowed key", b"", b""]

    def _log_refusal(self, address: bytes) -> None:
        self._num_refused += 1
        now = time.monotonic()
        if now - self._logged_s >= LOG_PAUSE_S:
            self._logged_s = now
            shown = address[:64].decode(errors="replace")
            log.warning("refused a client at %s without an allowed key; %d so far", shown, self._num_refused)
