"""A histogram that is cheap to fill: a request's many gaps between tokens go in as one list, at its end.

Not locked: the router's one event loop fills it. A page that is written meanwhile may miss a part of a request, never a
value of an earlier one. The client library's own takes a lock and walks all buckets for each value.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """One series for each of `values` of `label`, or a single one without label; all are there from the start."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label: str | None = None, values: Sequence[str] = ("",)
    ) -> None:
        assert list(bounds) == sorted(bounds)
        self._name, self._text, self._label = name, text, label
        self._bounds = tuple(bounds)
        self._counts = {value: [0] * (len(bounds) + 1) for value in values}
        self._sums = dict.fromkeys(values, 0.0)

    def observe(self, values: Iterable[float], label_value: str = "") -> None:
        counts, bounds, total = self._counts[label_value], self._bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self._sums[label_value] += total

    def collect(self) -> Iterator[Metric]:
        labels = [self._label] if self._label else []
        family = HistogramMetricFamily(self._name, self._text, labels=labels)
        names = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        for value, counts in self._counts.items():
            buckets = list(zip(names, accumulate(counts), strict=True))
            family.add_metric([value] if labels else [], buckets, self._sums[value])
        yield family
