"""The cheap histogram says what the client library's own would say."""

from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, Histogram as Reference, generate_latest
from twinpool.router.histogram import Histogram

BOUNDS = (0.001, 0.01, 0.1, 1.0, 5.0)
VALUES = st.lists(st.one_of(st.floats(0, 10), st.sampled_from(BOUNDS)), max_size=20)


@given(VALUES, VALUES)
def test_the_same_page_as_the_library(first: list[float], second: list[float]) -> None:
    """Values on a bound, below and above all; several batches; a label whose values are all there at once."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x_seconds", "Text.", BOUNDS, "stage", ("a", "b", "never"))
    ours.register(histogram)
    reference = Reference("x_seconds", "Text.", ["stage"], buckets=BOUNDS, registry=theirs)
    reference.labels("never")
    for stage, values in (("a", first), ("b", second), ("a", second)):
        histogram.observe(values, stage)
        for value in values:
            reference.labels(stage).observe(value)
        reference.labels(stage)
    assert _lines(ours) == _lines(theirs)


def test_without_a_label() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("x_seconds", "Text.", BOUNDS)
    registry.register(histogram)
    histogram.observe([0.001, 0.5, 7.0])
    assert registry.get_sample_value("x_seconds_bucket", {"le": "0.001"}) == 1
    assert registry.get_sample_value("x_seconds_bucket", {"le": "1.0"}) == 2
    assert registry.get_sample_value("x_seconds_count") == 3
    assert registry.get_sample_value("x_seconds_sum") == 7.501


def _lines(registry: CollectorRegistry) -> list[str]:
    """Sums are rounded: the order of the additions differs."""
    lines = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    return sorted(f"{line.split()[0]} {float(line.split()[1]):.9g}" for line in lines if not line.startswith("#"))
