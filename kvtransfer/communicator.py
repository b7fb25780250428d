"""One end of one communicator: a thread that builds it and moves payloads, one after the other.

Its owner gives it jobs, which never wait, and hears through `report` what came of them. It ends by `leave`, by a
failure, or not at all: a library that does not let go of a thread can only be freed by the death of the process.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from .frames import Announce, checksum
from .process_groups import ProcessGroup, RelayStore
from .transport import Way

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommunicatorSettings:
    way: Way
    make_group: Callable[[int], ProcessGroup]  # takes the rank
    build_s: float
    wait_s: float  # for one payload
    free_s: float
    on_stuck: Callable[[str], object]  # called from any thread when a communicator cannot be freed


@dataclass(frozen=True)
class Exchanged:
    """The peer has to know this to connect."""

    communicator: int
    name: str
    value: bytes


@dataclass(frozen=True)
class Posted:
    communicator: int
    frame: Announce


@dataclass(frozen=True)
class Landed:
    communicator: int
    payload: memoryview
    is_intact: bool


@dataclass(frozen=True)
class Broken:
    communicator: int
    reason: str


Report = Exchanged | Posted | Landed | Broken


class Communicator:
    def __init__(
        self, number: int, rank: int, settings: CommunicatorSettings, report: Callable[[Report], None]
    ) -> None:
        self.number = number
        self._group = settings.make_group(rank)
        self._settings = settings
        self._report = report
        self._store = RelayStore(lambda name, value: report(Exchanged(number, name, value)), settings.build_s)
        self._jobs: SimpleQueue[Announce | memoryview | None] = SimpleQueue()
        self._posted: list[Announce] = []
        self._watch: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"communicator-{number}", daemon=True)
        self._thread.start()

    def put(self, name: str, value: bytes) -> None:
        """Take over what the peer's end has to say."""
        self._store.put(name, value)

    def post(self, frame: Announce) -> None:
        """Be ready for the payload of `frame`, report Posted, and Landed when it is here."""
        self._jobs.put(frame)

    def send(self, payload: memoryview) -> None:
        self._jobs.put(payload)

    def leave(self) -> None:
        """Give it up, whatever is under way; never waits. Twice is fine."""
        if self._watch is None:
            self._watch = threading.Thread(target=self._free, name=f"free-communicator-{self.number}", daemon=True)
            self._watch.start()

    def is_freed(self, wait_s: float = 0.0) -> bool:
        """True when it was left and nothing of it remains."""
        if self._watch is not None and wait_s:
            self._watch.join(wait_s)
        return self._watch is not None and not self._watch.is_alive() and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._group.connect(self._store, self._settings.build_s)
            while self._work():
                pass
        except Exception as error:
            self._report(Broken(self.number, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
        finally:
            del self._group

    def _work(self) -> bool:
        """Do one thing: what is asked for, else wait for the payload that is due. False: no more."""
        try:
            job = self._jobs.get(block=not self._posted)
        except Empty:
            self._take()
            return True
        if isinstance(job, Announce):
            self._group.post(job.num_bytes)
            self._posted.append(job)
            self._report(Posted(self.number, job))
        elif job is not None:
            self._group.send(job, self._settings.wait_s)
        return job is not None

    def _take(self) -> None:
        frame = self._posted.pop(0)
        payload = self._group.take(self._settings.wait_s)
        self._report(Landed(self.number, payload, checksum(payload) == frame.checksum))

    def _free(self) -> None:
        """End the thread; the abort is a thread as well, because it may hang like anything else in there."""
        deadline_s = time.monotonic() + self._settings.free_s
        group = getattr(self, "_group", None)
        self._jobs.put(None)
        self._store.close()
        abort = threading.Thread(target=_abort, args=(group,), name=f"abort-communicator-{self.number}", daemon=True)
        abort.start()
        del group
        for thread in (abort, self._thread):
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if abort.is_alive() or self._thread.is_alive():
            self._settings.on_stuck(f"communicator {self.number} cannot be freed within {self._settings.free_s:g} s")


def _abort(group: ProcessGroup | None) -> None:
    if group is not None:
        group.abort()
