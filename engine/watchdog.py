"""Ends a worker whose engine loop hangs, so that whoever supervises it starts a new one.

The router notices a hung loop by its heartbeats and moves the requests elsewhere; but nobody outside can free a loop
that waits for a dead device or a dead peer. A thread looks at the loop's progress and counts its own looks, not the
clock: time in which the whole process stood still (SIGSTOP, a suspended machine) proves nothing about the loop.
Knows no engine and no router. A loop that hangs with the interpreter lock held stops this thread, too; then there are
no heartbeats either, and the end has to come from outside.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from ..cluster.role import EXIT_HUNG

log = logging.getLogger(__name__)

LOOKS = 30  # before the end is near; so many times the interval is `hung_after_s`
STRETCH_FACTOR = 10.0  # of what the loop has computed at a stretch before


class Progress:
    """How often the loop has moved, and what it computed at most in between; written by the loop, read by others."""

    def __init__(self) -> None:
        self.count = 0
        self.longest_stretch_s = 0.0  # processor time of the loop's own thread
        self._used_s = time.thread_time()

    def moved(self) -> None:
        """Call it from the loop's thread."""
        used_s = time.thread_time()
        self.longest_stretch_s = max(self.longest_stretch_s, used_s - self._used_s)
        self._used_s = used_s
        self.count += 1


class Standstill:
    """For how long the loop has not moved, in looks. Pure."""

    def __init__(self, hung_after_s: float) -> None:
        self.interval_s = hung_after_s / LOOKS
        self.stood_s = 0.0
        self._hung_after_s = hung_after_s
        self._seen = -1

    def look(self, progress: Progress) -> bool:
        """Call it every `interval_s`; true when the loop hangs."""
        self.stood_s = self.stood_s + self.interval_s if progress.count == self._seen else 0.0
        self._seen = progress.count
        return self.stood_s >= max(self._hung_after_s, STRETCH_FACTOR * progress.longest_stretch_s)


class Watchdog:
    def __init__(self, progress: Progress, hung_after_s: float, end: Callable[[], None]) -> None:
        """Look from now on; `end` is called once, from a thread of ours, when the loop hangs."""
        self._progress = progress
        self._standstill = Standstill(hung_after_s)
        self._end = end
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        standstill = self._standstill
        while not self._closing.wait(standstill.interval_s):
            if standstill.look(self._progress):
                log.critical("the engine loop stands still for %.1f s: ending, to be restarted", standstill.stood_s)
                self._end()
                return


def end_process() -> None:
    """Say where every thread stands, and end at once: a hung loop cannot be asked to clean up."""
    faulthandler.dump_traceback(sys.stderr)
    os._exit(EXIT_HUNG)
