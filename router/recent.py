"""The latencies of the last answers, for the page: a bounded window, of which median and 95th percentile are told.

Prometheus has the histograms of all; this is what somebody who just looks wants to see.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ..cluster.metrics import inter_token_latencies_s
from .job_record import JobRecord

MAX_ANSWERS = 256
MAX_GAPS = 4096
NUM_SHOWN = 60


class RecentLatencies:
    """TTFT of the last answers, and the gaps between their last tokens; as clients saw them."""

    def __init__(self) -> None:
        self._ttft_s: deque[float] = deque(maxlen=MAX_ANSWERS)
        self._gaps_s: deque[float] = deque(maxlen=MAX_GAPS)
        self._mean_gap_s: deque[float] = deque(maxlen=NUM_SHOWN)  # of each answer

    def observe(self, record: JobRecord) -> None:
        """Note the answers of a request that ended well."""
        if not record.is_finished:
            return
        for token_times_s in record.token_times_s.values():
            if not token_times_s:
                continue
            self._ttft_s.append(token_times_s[0] - record.accepted_s)
            gaps_s = inter_token_latencies_s(token_times_s[-MAX_GAPS:])
            if gaps_s:
                self._gaps_s.extend(gaps_s)
                self._mean_gap_s.append(sum(gaps_s) / len(gaps_s))

    def describe(self) -> dict[str, Any]:
        """JSON-ready; `recent_s` holds a value an answer, oldest first."""
        return {
            "ttft": _summary(self._ttft_s, list(self._ttft_s)[-NUM_SHOWN:]),
            "itl": _summary(self._gaps_s, self._mean_gap_s),
        }


def _summary(values: Sequence[float], recent: Iterable[float]) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median_s": _at_rank(ordered, 0.5),
        "p95_s": _at_rank(ordered, 0.95),
        "recent_s": [round(value, 6) for value in recent],
    }


def _at_rank(ordered: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile; None of nothing."""
    return round(ordered[max(0, -int(-share * len(ordered) // 1) - 1)], 6) if ordered else None
