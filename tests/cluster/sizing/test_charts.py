"""The chart kit: each picture is well-formed, holds what it was given in its place, and says what it left out."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st
from twinpool.cluster.sizing.charts import (
    BarChart,
    HeatMap,
    LineChart,
    Series,
    distribution,
    frontier,
    weighted_distribution,
)
from twinpool.cluster.sizing.svg import linear_ticks, log_ticks, scale_over

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>\"&'</script>"


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def words(svg: str) -> list[str]:
    return [element.text or "" for element in parse(svg).iter(f"{SVG}text")]


def dots(svg: str) -> list[tuple[float, float, str]]:
    """Return (x, y, hover text) of every dot of a chart."""
    found = list[tuple[float, float, str]]()
    for group in parse(svg).iter(f"{SVG}g"):
        title = group.find(f".//{SVG}title")
        if title is not None:
            x, y = re.findall(r"[\d.]+", group.attrib["transform"])
            found.append((float(x), float(y), title.text or ""))
    return found


def test_points_stand_where_their_values_say() -> None:
    """Equal steps of the value are equally far apart, upwards and to the right; on log axes equal factors are."""
    points = [(0.0, 0.0), (5.0, 10.0), (10.0, 20.0)]
    (x0, y0, _), (x1, y1, _), (x2, y2, _) = dots(LineChart("t", "x", "y", [Series("a", points, "dots")]).svg())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x1 > x0
    assert y1 < y0
    logs = [(1.0, 1.0), (10.0, 100.0), (100.0, 10_000.0)]
    chart = LineChart("t", "x", "y", [Series("a", logs, "dots")], x_log=True, y_log=True)
    (x0, y0, _), (x1, y1, _), (x2, y2, _) = dots(chart.svg())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_everything_is_named_and_escaped() -> None:
    chart = LineChart(HOSTILE, HOSTILE, HOSTILE, [Series(HOSTILE, [(1, 2)])], y_limits=[(HOSTILE, 3.0)])
    assert words(chart.svg()).count(HOSTILE) == 5
    assert parse(chart.svg()).attrib["aria-label"] == HOSTILE
    heat = HeatMap(HOSTILE, HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], [[1.0]])
    assert words(heat.svg()).count(HOSTILE) == 5
    assert words(BarChart(HOSTILE, HOSTILE, [(HOSTILE, 1.0)]).svg()).count(HOSTILE) == 3


def test_what_cannot_be_drawn_is_counted() -> None:
    points = [(1.0, 1.0), (2.0, math.inf), (3.0, math.nan), (0.0, 1.0)]
    chart = LineChart("t", "x", "y", [Series("a", points)], x_log=True)
    assert len(dots(chart.svg())) == 1
    assert any(word.startswith("3 points are not drawn") for word in words(chart.svg()))
    assert not any("not drawn" in word for word in words(LineChart("t", "x", "y", [Series("a", points[:1])]).svg()))


@pytest.mark.parametrize("series", [[], [Series("a", [])], [distribution("a", [])]])
def test_a_chart_of_nothing_says_so(series: list[Series]) -> None:
    assert "no data" in words(LineChart("t", "x", "y", series).svg())


def test_weights_count_as_often_as_they_say() -> None:
    assert weighted_distribution("a", {2.0: 3, 1.0: 1, 9.0: 0}) == distribution("a", [1.0, 2.0, 2.0, 2.0])


def test_a_distribution_ends_at_one_and_counts_ties_once() -> None:
    assert distribution("a", [3.0, 1.0, 3.0, 2.0]).points == [(1.0, 0.0), (1.0, 0.25), (2.0, 0.5), (3.0, 1.0)]


def test_a_long_curve_keeps_its_ends_and_stays_small() -> None:
    """A distribution of a hundred thousand values is drawn to half a pixel, from its first point to its last."""
    svg = LineChart("t", "x", "y", [distribution("a", [i / 1e5 for i in range(100_000)])]).svg()
    assert len(svg) < 60_000
    path = next(element.attrib["d"] for element in parse(svg).iter(f"{SVG}path") if "V" in element.attrib["d"])
    assert path.startswith("M72.0 ")
    top = min(float(element.attrib["y1"]) for element in parse(svg).iter(f"{SVG}line"))
    assert path.endswith(f"V{top:.1f}")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_the_frontier_is_what_nothing_dominates(points: list[tuple[int, int]]) -> None:
    """Compared with the definition, cheap (low x) and good (high y)."""

    def dominated(x: float, y: float) -> bool:
        return any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)

    assert frontier(points, "low", "high") == sorted({point for point in points if not dominated(*point)})
    mirrored = frontier([(-x, -y) for x, y in points], "high", "low")
    assert sorted((-x, -y) for x, y in mirrored) == frontier(points, "low", "high")


def test_heat_map_shades_by_value_and_tells_untried_cells() -> None:
    chart = HeatMap("t", "D", "P", [1, 2], [1, 2], [[0.0, 0.5], [None, 1.0]], format=".0%", marked=(1, 1))
    shades = {
        element.findtext(f"{SVG}title"): float(element.attrib["fill-opacity"])
        for element in parse(chart.svg()).iter(f"{SVG}rect")
    }
    assert list(shades) == ["P 1, D 1: 0%", "P 1, D 2: 50%", "P 2, D 1: –", "P 2, D 2: 100%"]
    assert shades["P 1, D 1: 0%"] < shades["P 1, D 2: 50%"] < shades["P 2, D 2: 100%"]
    assert shades["P 2, D 1: –"] == 0
    marked = [element for element in parse(chart.svg()).iter(f"{SVG}rect") if "stroke-width" in element.attrib]
    assert [element.findtext(f"{SVG}title") for element in marked] == ["P 2, D 2: 100%"]


def test_bars_are_as_long_as_their_values() -> None:
    svg = BarChart("t", "s", [("a", 1.0), ("b", 3.0), ("c", math.inf)]).svg()
    a, b, c = (float(element.attrib["width"]) for element in parse(svg).iter(f"{SVG}rect"))
    assert b == pytest.approx(3 * a, abs=0.05)
    assert c == 0
    assert "inf" in words(svg)


@given(st.floats(-1e6, 1e6), st.floats(1e-4, 1e6))
def test_ticks_are_round_inside_and_not_too_many(low: float, width: float) -> None:
    ticks = linear_ticks(low, low + width)
    assert 2 <= len(ticks) <= 8
    assert all(low - width * 1e-6 <= tick <= low + width * (1 + 1e-6) for tick in ticks)


def test_log_ticks_and_scales_hold_all_values() -> None:
    assert log_ticks(1, 100) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(0.001, 1000) == [0.001, 0.01, 0.1, 1, 10, 100, 1000]
    scale = scale_over([0.03, 7.0], (0, 100), log=True)
    assert (scale.low, scale.high) == (0.01, 10)
    flat = scale_over([5.0, 5.0], (0, 100))
    assert flat.low < 5 < flat.high
