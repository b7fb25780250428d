"""Which announced frames are received now, over which communicator, and in which order all messages go on. Pure.

Stands between the data connections of all PROMPT workers and the COMPLETION worker's loop:
1. A header comes with its payload, or as an Announce. The first Announce of a peer gets it a communicator (Build).
2. Announced frames are waited for in order (Post), a few ahead, as far as there is room to stage them.
3. Every message goes on (Deliver) in the order its peer sent it: what lies behind a frame waits until it has landed.
4. When a communicator fails, or makes no progress in time, what it still owed goes on without its bytes, so that
   the receiver of transfers refuses it; the next Announce gets the peer a new one.
Nothing here touches the cache: generation, order, length and checksum are checked after a frame has landed.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from .frames import Announce, Received

Peer = bytes
NOTHING = memoryview(b"")


@dataclass(frozen=True)
class StagingLimits:
    max_communicators: int
    max_frame_bytes: int
    max_staged_bytes: int
    wait_s: float  # for the next frame, or for a place among the communicators
    build_s: float
    idle_s: float
    max_entries: int = 1024  # messages that have not gone on
    max_posted: int = 2  # frames a communicator is ready for: one on its way, one behind it


@dataclass(frozen=True)
class Build:
    """Tell the peer to join, and build our end."""

    communicator: int
    peer: Peer


@dataclass(frozen=True)
class Post:
    """Be ready for this frame's payload, then tell the peer Go."""

    communicator: int
    peer: Peer
    frame: Announce


@dataclass(frozen=True)
class Deliver:
    received: Received


@dataclass(frozen=True)
class Drop:
    """Tell the peer to leave, and give up our end, whatever it does."""

    communicator: int
    peer: Peer
    reason: str


StagingCommand = Build | Post | Deliver | Drop


@dataclass
class Entry:
    received: Received
    state: Literal["waiting", "posted", "here"]


@dataclass
class Line:
    """One peer's messages that have not gone on, and its communicator."""

    peer: Peer
    entries: deque[Entry] = field(default_factory=deque[Entry])
    communicator: int | None = None
    used_s: float = 0.0
    expires_at: float | None = None  # progress must come by then

    def entries_in(self, state: Literal["waiting", "posted"]) -> list[Entry]:
        return [entry for entry in self.entries if entry.state == state]


class Staging:
    def __init__(self, limits: StagingLimits) -> None:
        assert limits.max_frame_bytes <= limits.max_staged_bytes, "one frame must find room"
        self._limits = limits
        self._lines: dict[Peer, Line] = {}
        self._num_built = 0
        self._num_posted_bytes = 0
        self._num_here_bytes = 0  # until they are taken

    @property
    def is_full(self) -> bool:
        """Take no more messages from the peers for now.

        What is only posted does not count: a communicator that is being built needs the messages.
        """
        num_entries = sum(len(line.entries) for line in self._lines.values())
        return self._num_here_bytes >= self._limits.max_staged_bytes or num_entries >= self._limits.max_entries

    @property
    def num_communicators(self) -> int:
        return sum(line.communicator is not None for line in self._lines.values())

    def arrived(self, received: Received, now: float) -> list[StagingCommand]:
        line = self._lines.setdefault(received.peer, Line(received.peer))
        message = received.message
        if isinstance(message, Announce) and message.num_bytes <= self._limits.max_frame_bytes:
            line.entries.append(Entry(received, "waiting"))
        else:
            self._num_here_bytes += received.payload.nbytes
            line.entries.append(Entry(received, "here"))
        return self._go_on(now)

    def posted(self, communicator: int, now: float) -> list[StagingCommand]:
        """We are ready for a frame, and so the communicator is built."""
        self._progress(communicator, self._limits.wait_s, now)
        return []

    def landed(self, communicator: int, payload: memoryview, is_intact: bool, now: float) -> list[StagingCommand]:
        """The oldest posted frame is here."""
        line = self._progress(communicator, self._limits.wait_s, now)
        if line is None:
            return []
        entry = line.entries_in("posted")[0]
        entry.received = replace(entry.received, payload=payload, is_intact=is_intact)
        entry.state, line.used_s = "here", now
        self._num_posted_bytes -= payload.nbytes
        self._num_here_bytes += payload.nbytes
        if not line.entries_in("posted"):
            line.expires_at = None
        return self._go_on(now)

    def broken(self, communicator: int, reason: str, now: float) -> list[StagingCommand]:
        line = self._line_of(communicator)
        return [] if line is None else [*self._fail(line, reason), *self._go_on(now)]

    def taken(self, num_bytes: int, now: float) -> list[StagingCommand]:
        """Delivered bytes were copied or thrown away."""
        self._num_here_bytes -= num_bytes
        return self._go_on(now)

    def tick(self, now: float) -> list[StagingCommand]:
        """Give up what made no progress in time, and communicators that nobody has used for long."""
        commands: list[StagingCommand] = []
        for line in list(self._lines.values()):
            if line.expires_at is not None and now >= line.expires_at:
                commands += self._fail(line, "no progress in time")
            elif line.communicator is not None and not line.entries and now >= line.used_s + self._limits.idle_s:
                commands.append(self._drop(line, f"unused for {self._limits.idle_s:g} s"))
        return [*commands, *self._go_on(now)]

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        return min((at for line in self._lines.values() for at in self._deadlines(line)), default=None)

    def check(self) -> None:
        """Assert the limits, and that nothing waits without a deadline (I6, I8)."""
        assert self.num_communicators <= self._limits.max_communicators, "too many communicators"
        posted = [entry for line in self._lines.values() for entry in line.entries_in("posted")]
        assert self._num_posted_bytes == sum(_frame(entry).num_bytes for entry in posted), "posted bytes are miscounted"
        for line in self._lines.values():
            num_posted = len(line.entries_in("posted"))
            assert num_posted <= self._limits.max_posted, "too many frames are posted"
            assert not num_posted or line.communicator is not None, "posted without a communicator"
            assert not num_posted or line.expires_at is not None, "a frame is awaited without a deadline"
            assert line.entries or line.communicator is not None, "a peer without anything is remembered"
            assert not line.entries or line.entries[0].state != "here", "a message that could go on waits"

    def _go_on(self, now: float) -> list[StagingCommand]:
        """Deliver what is next in its line, and post what may be posted, peers in turn."""
        commands: list[StagingCommand] = []
        for line in list(self._lines.values()):
            while line.entries and line.entries[0].state == "here":
                commands.append(Deliver(line.entries.popleft().received))
        for line in list(self._lines.values()):
            commands += self._advance(line, now)
            if not line.entries and line.communicator is None:
                self._lines.pop(line.peer, None)
        return commands

    def _advance(self, line: Line, now: float) -> Iterator[StagingCommand]:
        waiting = line.entries_in("waiting")
        if not waiting or not self._has_room(waiting[0]):
            return  # who has the room makes progress, or fails
        if line.communicator is None:
            yield from self._make_place(now)
            if self.num_communicators >= self._limits.max_communicators:
                line.expires_at = line.expires_at or now + self._limits.wait_s
                return
            self._num_built += 1
            line.communicator, line.expires_at = self._num_built, now + self._limits.build_s
            yield Build(line.communicator, line.peer)
        yield from self._post(line, line.communicator, now)

    def _post(self, line: Line, communicator: int, now: float) -> Iterator[StagingCommand]:
        for entry in line.entries_in("waiting"):
            if not self._has_room(entry) or len(line.entries_in("posted")) >= self._limits.max_posted:
                break
            frame = _frame(entry)
            self._num_posted_bytes += frame.num_bytes
            entry.state, line.used_s = "posted", now
            line.expires_at = line.expires_at or now + self._limits.wait_s
            self._lines[line.peer] = self._lines.pop(line.peer)  # others first, next time
            yield Post(communicator, line.peer, frame)

    def _has_room(self, entry: Entry) -> bool:
        num_bytes = self._num_posted_bytes + self._num_here_bytes + _frame(entry).num_bytes
        return num_bytes <= self._limits.max_staged_bytes

    def _make_place(self, now: float) -> Iterator[StagingCommand]:
        """Give up the communicator that is out of use for longest, when all are taken."""
        idle = [line for line in self._lines.values() if line.communicator is not None and not line.entries]
        if self.num_communicators >= self._limits.max_communicators and idle:
            longest = min(idle, key=lambda line: line.used_s)
            yield self._drop(longest, "another peer needs its place")
            del self._lines[longest.peer]

    def _fail(self, line: Line, reason: str) -> list[StagingCommand]:
        """What was announced will not come: it goes on without its bytes."""
        self._num_posted_bytes -= sum(_frame(entry).num_bytes for entry in line.entries_in("posted"))
        for entry in line.entries:
            entry.state = "here"
        return [] if line.communicator is None else [self._drop(line, reason)]

    def _drop(self, line: Line, reason: str) -> Drop:
        assert line.communicator is not None
        drop = Drop(line.communicator, line.peer, reason)
        line.communicator, line.expires_at = None, None
        return drop

    def _progress(self, communicator: int, within_s: float, now: float) -> Line | None:
        line = self._line_of(communicator)
        if line is not None:
            line.expires_at = now + within_s
        return line

    def _line_of(self, communicator: int) -> Line | None:
        return next((line for line in self._lines.values() if line.communicator == communicator), None)

    def _deadlines(self, line: Line) -> Iterator[float]:
        if line.expires_at is not None:
            yield line.expires_at
        elif line.communicator is not None and not line.entries:
            yield line.used_s + self._limits.idle_s


def _frame(entry: Entry) -> Announce:
    assert isinstance(entry.received.message, Announce)
    return entry.received.message
