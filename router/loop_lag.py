"""How late the router's event loop is: what blocks it (a large body, a long page) delays every stream at once. Pure."""

from collections import deque

WINDOW_S = 15.0  # a usual time between two scrapes, so that no peak falls between them


class LoopLag:
    """Keeps the largest lateness of the last WINDOW_S."""

    def __init__(self) -> None:
        self._peaks: deque[tuple[float, float]] = deque()  # (when, lateness), the lateness falling

    def note(self, late_s: float, now: float) -> None:
        while self._peaks and self._peaks[-1][1] <= late_s:
            self._peaks.pop()
        self._peaks.append((now, late_s))
        self._drop_old(now)

    def worst_s(self, now: float) -> float:
        self._drop_old(now)
        return self._peaks[0][1] if self._peaks else 0.0

    def _drop_old(self, now: float) -> None:
        while self._peaks and self._peaks[0][0] < now - WINDOW_S:
            self._peaks.popleft()
