"""Simulated time: what happens next. No wall time anywhere; events of one instant keep a fixed order.

Time goes by nanoseconds, so that sums of decimal durations that are equal on paper meet at one instant here as well.
"""

import heapq
from collections.abc import Callable

ARRIVAL, DELIVERY, PASS_END = range(3)  # at one instant: whatever comes is seen by the step that begins then

TICK_S = 1e-9


def instant(time_s: float) -> float:
    return round(time_s, 9)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._num_scheduled = 0

    def at(self, time_s: float, order: int, action: Callable[[], None]) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._events, (instant(time_s), order, self._num_scheduled, action))

    def run(self) -> None:
        """Let everything happen that is scheduled, and what follows from it."""
        events = self._events
        while events:
            self.now, _, _, action = heapq.heappop(events)
            action()
