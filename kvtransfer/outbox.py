"""What a sender has announced and not yet been asked for. Pure."""

from collections import deque
from dataclasses import dataclass

from .frames import Announce, Go


@dataclass(frozen=True)
class Announced:
    frame: Announce
    payload: memoryview

    def is_meant_by(self, go: Go) -> bool:
        frame = self.frame
        return (*frame.key, frame.generation, frame.sequence) == (*go.key, go.generation, go.sequence)


class Outbox:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._announced: deque[Announced] = deque()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def has_room(self, num_bytes: int) -> bool:
        """True when so many bytes more may be announced; one frame always may."""
        return self._num_bytes == 0 or self._num_bytes + num_bytes <= self._max_bytes

    def announce(self, frame: Announce, payload: memoryview) -> None:
        self._announced.append(Announced(frame, payload))
        self._num_bytes += payload.nbytes

    def go(self, go: Go) -> memoryview | None:
        """Return what `go` asks for, or None when that was never announced.

        What was announced before it is not wanted any more: the receiver asks in order.
        """
        if not any(announced.is_meant_by(go) for announced in self._announced):
            return None
        while True:
            announced = self._announced.popleft()
            self._num_bytes -= announced.payload.nbytes
            if announced.is_meant_by(go):
                return announced.payload
