"""The data channel over ZMQ: a COMPLETION worker's ROUTER that PROMPT workers' DEALERs connect to.

One ordered connection a pair; always two parts, header and payload. Same-host peers use ipc, others tcp. Large payloads
are lent to ZMQ, not copied (pyzmq does so from 64 KiB on): every payload is a fresh buffer, so nobody writes into it.
With keys both ends know each other: the receiver lets PROMPT workers in, a sender speaks to that receiver only.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import zmq

from ..cluster.protocol.curve import Gate, is_local, use_curve
from ..cluster.protocol.errors import ConfigError, ProtocolError
from ..cluster.protocol.keys import KeyRing, PeerKeys
from ..cluster.protocol.messages import Message
from ..cluster.protocol.parts import receive_parts
from .frames import (
    FROM_RECEIVER,
    FROM_SENDER,
    MAX_HEADER_BYTES,
    KVFrame,
    Received,
    checksum,
    decode_header,
    encode_header,
)

log = logging.getLogger(__name__)

HIGH_WATER_MESSAGES = 64
MAX_PARTS = 3  # identity, header, payload
HANDSHAKE_S = 2.0


class ZmqReceiver:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ipc_path: Path,
        max_frame_bytes: int,
        tcp_host: str = "127.0.0.1",
        tcp_port: int = 0,
        keys: KeyRing | None = None,
        kinds: Mapping[str, type[Message]] = FROM_SENDER,
    ) -> None:
        """Bind both addresses; `tcp_port` 0 is any free one. Raises ConfigError when one of them is no good.

        Messages that are not of `kinds` are dropped.
        """
        if keys is None and not is_local(f"tcp://{tcp_host}:"):
            raise ConfigError(
                f"--data-host {tcp_host} is not loopback",
                hint="other machines may connect only with keys: `twinpool keys FOLDER`, then --keys FOLDER",
            )
        self._kinds = kinds
        self.num_malformed = 0
        self.socket = context.socket(zmq.ROUTER)
        _set_common_options(self.socket, max_frame_bytes)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
        self._gate: Gate | None = None
        if keys is not None:
            self._gate = Gate(context, keys.admitted("prompt"))
            self._gate.guard(self.socket, keys.own)
        try:
            self.socket.bind(f"ipc://{ipc_path}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot open the data socket {ipc_path}: {error}",
                hint="--run-folder must be a folder that can be written, with a path well below 100 characters",
            ) from error
        try:
            self.socket.bind(f"tcp://{tcp_host}:{tcp_port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot open the data socket tcp://{tcp_host}:{tcp_port}: {error}") from error
        self.addresses = (f"ipc://{ipc_path}", self.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def sources(self) -> tuple[zmq.Socket[bytes]]:
        return (self.socket,)

    def receive(self) -> Received | None:
        """Return the next well-formed message, or None when there is none now.

        Raises RuntimeError when keys can no longer be checked.
        """
        if self._gate is not None:
            self._gate.check()
        while True:
            try:
                parts = receive_parts(self.socket, MAX_PARTS)
            except zmq.Again:
                return None
            received = self._parse(parts)
            if received is not None:
                return received
            self.num_malformed += 1

    def reply(self, peer: bytes, message: Message) -> None:
        """Answer `peer`; one that is gone or does not read is not waited for: its lease will run out."""
        try:
            self.socket.send_multipart([peer, encode_header(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("%s not sent: %s", type(message).__name__, error)

    def close(self) -> None:
        self.socket.close(linger=0)
        if self._gate is not None:
            self._gate.close()

    def _parse(self, parts: Sequence[zmq.Frame]) -> Received | None:
        if len(parts) != MAX_PARTS:
            log.warning("dropped a data message that has not %d parts", MAX_PARTS)
            return None
        peer, header, payload = parts
        try:
            message = decode_header(header.buffer, self._kinds)
        except ProtocolError as error:
            log.warning("dropped a data message: %s", error)
            return None
        is_intact = isinstance(message, KVFrame) and checksum(payload.buffer) == message.checksum
        return Received(peer.bytes, message, payload.buffer, is_intact)


class ZmqSender:
    """One connection to one COMPLETION worker; used by one thread. Raises ConnectionError."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Sequence[str],
        max_frame_bytes: int,
        send_timeout_s: float,
        peer: PeerKeys | None = None,
        kinds: Mapping[str, type[Message]] = FROM_RECEIVER,
    ) -> None:
        """Connect; with keys, wait until both ends have seen that they may speak to each other."""
        self._kinds = kinds
        self.address = choose_address(addresses)
        self.socket = context.socket(zmq.DEALER)
        _set_common_options(self.socket, max_frame_bytes)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.SNDTIMEO, int(send_timeout_s * 1000))
        try:
            self._connect(peer)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectionError(f"cannot connect to {self.address}: {error}") from error
        except ConnectionError:
            self.close()
            raise

    @property
    def sources(self) -> tuple[zmq.Socket[bytes]]:
        return (self.socket,)

    def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
        """Send a header and its payload. Raises TimeoutError when the peer takes nothing for `send_timeout_s`."""
        try:
            self.socket.send(encode_header(message), flags=zmq.SNDMORE)
            self.socket.send(payload, copy=False)
        except zmq.Again as error:
            raise TimeoutError(f"{self.address} takes no data") from error

    def receive(self) -> Message | None:
        """Return the next well-formed reply, or None when there is none now."""
        while True:
            try:
                header = self.socket.recv(flags=zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return decode_header(header, self._kinds)
            except ProtocolError as error:
                log.warning("dropped a reply: %s", error)

    def close(self, linger_s: float = 0.0) -> None:
        self.socket.close(linger=int(linger_s * 1000))

    def _connect(self, peer: PeerKeys | None) -> None:
        if peer is None:
            if not is_local(self.address):
                raise ConnectionError(f"{self.address} is on another machine, which takes keys")
            self.socket.connect(self.address)
            return
        if not self._shakes_hands(peer):
            raise ConnectionError(
                f"{self.address} and this worker do not know each other's keys, or nobody is there; "
                f"tried {len(peer.allowed)} allowed keys"
            )

    def _shakes_hands(self, peer: PeerKeys) -> bool:
        """Connect by the first key that the other side turns out to have; False when there is none."""
        with self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            try:
                for key in peer.allowed:
                    use_curve(self.socket, peer.own, key)
                    self.socket.connect(self.address)
                    if monitor.poll(int(HANDSHAKE_S * 1000)):
                        return True
                    self.socket.disconnect(self.address)
            finally:
                self.socket.disable_monitor()
        return False


def choose_address(addresses: Sequence[str]) -> str:
    """Return the ipc address when its socket exists on this machine, else the tcp one. Raises ConnectionError."""
    for address in addresses:
        if address.startswith("ipc://") and Path(address.removeprefix("ipc://")).exists():
            return address
    for address in addresses:
        if address.startswith("tcp://"):
            return address
    raise ConnectionError(f"there is no way to the peer among its addresses {list(addresses)}")


def _set_common_options(socket: zmq.Socket[bytes], max_frame_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + max_frame_bytes // 4 + MAX_HEADER_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
