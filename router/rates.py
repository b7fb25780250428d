"""How fast something goes while there is something to do. Pure: the clock is an argument."""

import math


class BusyRate:
    """An amount a second over the latest `window_s` of busy time; idle time neither counts nor fades what is known."""

    def __init__(self, window_s: float, least_s: float = 0.0) -> None:
        self._window_s = window_s
        self._least_s = least_s  # of busy time, before it is a measurement
        self._amount = 0.0
        self._busy_s = 0.0
        self._since_s: float | None = None

    @property
    def per_s(self) -> float | None:
        """None until there is a measurement."""
        if self._busy_s <= 0 or self._busy_s < self._least_s or self._amount <= 0:
            return None
        return self._amount / self._busy_s

    def observe(self, amount: float, now: float, is_busy: bool) -> None:
        """`amount` was done by `now`; `is_busy`: there is more to do from here on."""
        if self._since_s is not None:
            elapsed_s = max(now - self._since_s, 0.0)
            kept = math.exp(-elapsed_s / self._window_s)
            self._amount, self._busy_s = self._amount * kept, self._busy_s * kept + elapsed_s
            self._amount += amount
        self._since_s = now if is_busy else None
