"""The framing of ZMTP 3.x with the NULL mechanism, read from one direction of a connection. Pure: bytes in, units out.

A connection begins with a greeting of 64 bytes; frames follow: a byte of flags, a length of 1 or 8 bytes, a body.
Frames up to the first one without MORE are one message; commands (READY, PING, PONG, ERROR) stand between messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


@dataclass(frozen=True)
class Raw:
    """Part of a greeting, or a command: to be passed on as it is."""

    data: bytes


@dataclass(frozen=True)
class Message:
    """The bodies of all its frames."""

    frames: tuple[bytes, ...]

    @property
    def data(self) -> bytes:
        *before, last = self.frames
        return b"".join(_frame(body, MORE) for body in before) + _frame(last, 0)


Unit = Raw | Message


@dataclass
class Parser:
    """Takes one direction's bytes as they come, in whatever pieces."""

    _buffer: bytearray = field(default_factory=bytearray)
    _num_greeted: int = 0
    _frames: list[bytes] = field(default_factory=list[bytes])

    def feed(self, data: bytes) -> Iterator[Unit]:
        self._buffer += data
        if self._num_greeted < GREETING_BYTES:  # both sides send it in parts and wait for each other's
            greeting = self._take(min(GREETING_BYTES - self._num_greeted, len(self._buffer)))
            self._num_greeted += len(greeting)
            yield Raw(greeting)
        while (frame := self._next_frame()) is not None:
            flags, body, whole = frame
            if flags & COMMAND:
                yield Raw(whole)
                continue
            self._frames.append(body)
            if not flags & MORE:
                yield Message(tuple(self._frames))
                self._frames.clear()

    def _next_frame(self) -> tuple[int, bytes, bytes] | None:
        """Take a whole frame off the buffer: flags, body, and all its bytes. None while there is none."""
        if len(self._buffer) < 2:
            return None
        flags = self._buffer[0]
        head = 9 if flags & LONG else 2
        if len(self._buffer) < head:
            return None
        end = head + int.from_bytes(self._buffer[1:head], "big")
        if len(self._buffer) < end:
            return None
        whole = self._take(end)
        return flags, whole[head:], whole

    def _take(self, num_bytes: int) -> bytes:
        taken = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return taken


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body
