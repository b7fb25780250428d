"""When a role that died is started again, and when it is given up. Pure: deaths and a clock in, a delay out.

Stands beside every supervisor. It does not know processes; exit codes come in as numbers.
"""

import signal
from collections import deque
from dataclasses import dataclass

from ..role import EXIT_CONFIG, EXIT_HUNG, EXIT_REFUSED, EXIT_STUCK

FINAL_CODES = {EXIT_CONFIG: "its configuration is wrong", EXIT_REFUSED: "the router refused it"}
REASONS = FINAL_CODES | {EXIT_HUNG: "its engine loop hung", EXIT_STUCK: "a communicator for KV hung"}


@dataclass(frozen=True)
class RestartPolicy:
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    max_deaths: int = 5
    window_s: float = 30.0


class Restarts:
    """The deaths of one role so far."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths_s: deque[float] = deque(maxlen=policy.max_deaths)
        self._num_in_a_row = 0

    def died(self, now_s: float, lifetime_s: float) -> float | None:
        """Return the delay before the next start, or None when there were too many deaths in the window.

        A life longer than the window ends the row, so that the back-off starts anew.
        """
        self._num_in_a_row = 1 if lifetime_s >= self._policy.window_s else self._num_in_a_row + 1
        self._deaths_s.append(now_s)
        is_full = len(self._deaths_s) == self._policy.max_deaths
        if is_full and now_s - self._deaths_s[0] <= self._policy.window_s:
            return None
        doubled_s = self._policy.first_delay_s * 2.0 ** min(self._num_in_a_row - 1, 30)
        return min(self._policy.max_delay_s, doubled_s)


def describe_exit(returncode: int) -> str:
    """Say in words how a process ended; `returncode` as `subprocess` gives it."""
    if returncode < 0:
        try:
            return f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    reason = REASONS.get(returncode)
    return f"exited with code {returncode}" + (f": {reason}" if reason else "")
