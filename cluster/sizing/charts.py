"""Charts as SVG text: curves, distributions and points; heat maps; bars. They know nothing of what they show.

    LineChart("Goodput", "requests/s offered", "requests/s good", [Series("shared", points), …]).svg()

Every chart says by itself what it had to leave out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isfinite
from typing import Literal

from .svg import NUM_COLORS, Scale, box, document, legend, line, number, scale_over, shape, text

Point = tuple[float, float]
WIDTH = 720
LEFT, RIGHT = 72, 28
PLOT_HEIGHT = 280
DASHES = ("", "8 4", "2 3", "10 3 2 3")  # told apart without colours as well
CLOSE_PX = 0.5
NUM_HOVERS = 200  # points of one series that answer a pointer; a curve of thousands would only grow the file


@dataclass(frozen=True)
class Series:
    """`step` holds its y until the next x, as a distribution does; `names` are the points' hover texts."""

    label: str
    points: Sequence[Point]
    shape: Literal["line", "step", "dots"] = "line"
    names: Sequence[str] = ()


def distribution(label: str, values: Iterable[float]) -> Series:
    """Return the cumulative distribution of the values, rising from 0 to 1."""
    return weighted_distribution(label, Counter(values))


def weighted_distribution(label: str, counts: Mapping[float, int]) -> Series:
    """Return the distribution of values of which each occurred so many times."""
    ordered = sorted(value for value, count in counts.items() if count)
    up_to = list(accumulate(counts[value] for value in ordered))
    steps = [(value, num / up_to[-1]) for value, num in zip(ordered, up_to, strict=True)]
    return Series(label, [(ordered[0], 0.0), *steps] if ordered else [], "step")


def frontier(
    points: Iterable[Point], x_better: Literal["low", "high"], y_better: Literal["low", "high"]
) -> list[Point]:
    """Return the Pareto frontier, by rising x: the points that no other is as good as in both and better in one."""
    x_sign, y_sign = (1 if better == "high" else -1 for better in (x_better, y_better))
    kept, best = list[Point](), -inf
    for x, y in sorted(set(points), key=lambda point: (-x_sign * point[0], -y_sign * point[1])):
        if y_sign * y > best:
            kept.append((x, y))
            best = y_sign * y
    return sorted(kept)


@dataclass(frozen=True)
class LineChart:
    """Curves, steps and dots over two axes. `x_limits` and `y_limits` are labelled lines across, such as an SLO."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    y_zero: bool = True  # the y axis starts at 0, unless it is logarithmic
    x_limits: Sequence[tuple[str, float]] = ()
    y_limits: Sequence[tuple[str, float]] = ()

    def svg(self) -> str:
        drawn = [self._drawable(series) for series in self.series]
        entries = [(_sample(i, series), series.label) for i, series in enumerate(self.series)]
        parts, top = legend(46, entries, WIDTH)
        bottom = top + PLOT_HEIGHT
        xs = [x for points in drawn for (x, _), _ in points]
        ys = [y for points in drawn for (_, y), _ in points]
        if xs:
            x = scale_over(xs + [v for _, v in self.x_limits], (LEFT, WIDTH - RIGHT), self.x_log)
            y = scale_over(ys + [v for _, v in self.y_limits], (bottom, top), self.y_log, zero=self.y_zero)
            parts += _axes(x, y, self.x_label, self.y_label)
            parts += [part for i, points in enumerate(drawn) for part in _curve(i, self.series[i], points, x, y)]
            parts += self._limits(x, y)
        else:
            parts.append(text(WIDTH / 2, (top + bottom) / 2, "no data", "middle", "soft"))
        num_left_out = sum(len(series.points) for series in self.series) - len(xs)
        if num_left_out:
            note = f"{num_left_out} points are not drawn: not finite, or not positive on a logarithmic axis"
            parts.append(text(WIDTH - RIGHT, bottom + 56, note, "end", "soft"))
        return document(self.title, WIDTH, bottom + 64, parts)

    def _drawable(self, series: Series) -> list[tuple[Point, str]]:
        names = series.names or [f"{series.label}: {number(x)}, {number(y)}" for x, y in series.points]
        assert len(names) == len(series.points), "one name a point"
        return [
            (point, name)
            for point, name in zip(series.points, names, strict=True)
            if all(isfinite(v) and (v > 0 or not log) for v, log in zip(point, (self.x_log, self.y_log), strict=True))
        ]

    def _limits(self, x: Scale, y: Scale) -> list[str]:
        parts = list[str]()
        for label, value in self.x_limits:
            parts.append(line(x(value), y.start_px, x(value), y.end_px, "limit"))
            parts.append(text(x(value) - 4, y.end_px + 6, label, "end", "soft halo", rotate=True))
        for label, value in self.y_limits:
            parts.append(line(x.start_px, y(value), x.end_px, y(value), "limit"))
            parts.append(text(x.end_px, y(value) - 4, label, "end", "soft halo"))
        return parts


@dataclass(frozen=True)
class HeatMap:
    """`cells[row][column]` belongs to `rows[row]` and `columns[column]`; None was not tried. Row 0 is at the bottom."""

    title: str
    x_label: str
    y_label: str
    columns: Sequence[object]
    rows: Sequence[object]
    cells: Sequence[Sequence[float | None]]
    format: str = ".3g"  # of the values: ".0%" for shares
    low: float | None = None  # the palest value, the lowest there is by default
    high: float | None = None
    marked: tuple[int, int] | None = None  # (row, column) of the chosen cell

    def svg(self) -> str:
        values = [value for row in self.cells for value in row if value is not None]
        low = self.low if self.low is not None else min(values, default=0.0)
        high = self.high if self.high is not None else max(values, default=1.0)
        width = min(90.0, (WIDTH - LEFT - RIGHT) / max(1, len(self.columns)))
        height, top = 30.0, 40.0
        bottom = top + height * len(self.rows)
        parts = list[str]()
        for row, row_cells in enumerate(self.cells):
            y = bottom - height * (row + 1)
            parts.append(text(LEFT - 8, y + 20, str(self.rows[row]), "end"))
            for column, value in enumerate(row_cells):
                share = 0.0 if value is None or high <= low else min(1.0, max(0.0, (value - low) / (high - low)))
                parts += self._cell(
                    (row, column), value, 0.05 + 0.85 * share, (LEFT + width * column, y, width, height)
                )
        for column, label in enumerate(self.columns):
            parts.append(text(LEFT + width * (column + 0.5), bottom + 18, str(label), "middle"))
        parts.append(text(LEFT + width * len(self.columns) / 2, bottom + 40, self.x_label, "middle", "soft"))
        parts.append(text(18, (top + bottom) / 2, self.y_label, "middle", "soft", rotate=True))
        return document(self.title, WIDTH, bottom + 52, parts)

    def _cell(
        self, at: tuple[int, int], value: float | None, shade: float, place: tuple[float, float, float, float]
    ) -> list[str]:
        x, y, width, height = place
        words = "–" if value is None else format(value, self.format)
        hover = f"{self.y_label} {self.rows[at[0]]}, {self.x_label} {self.columns[at[1]]}: {words}"
        stroke = "var(--c1)" if at == self.marked else "var(--line)"
        look = f'fill="var(--heat)" fill-opacity="{0 if value is None else shade:.2f}" stroke="{stroke}"'
        thick = ' stroke-width="3"' if at == self.marked else ""
        edge = 2 if at == self.marked else 1
        drawn = box(x + edge, y + edge, width - 2 * edge, height - 2 * edge, look + thick, hover)
        return [drawn, text(x + width / 2, y + 20, words, "middle")]


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars from zero, one a line, each with its value."""

    title: str
    x_label: str
    bars: Sequence[tuple[str, float]]
    format: str = ".3g"

    def svg(self) -> str:
        left = min(260.0, 24 + 6.8 * max((len(label) for label, _ in self.bars), default=0))
        top, bottom = 36.0, 36.0 + 26 * len(self.bars)
        parts = list[str]()
        values = [value for _, value in self.bars if isfinite(value)] or [0.0]
        x = scale_over(values, (left, WIDTH - 80), zero=True)
        for tick in x.ticks():
            parts += [line(x(tick), top, x(tick), bottom), text(x(tick), bottom + 18, number(tick), "middle", "soft")]
        for i, (label, value) in enumerate(self.bars):
            y, words = top + 26 * i, format(value, self.format)
            start, end = sorted((x(0.0), x(value))) if isfinite(value) else (x(0.0), x(0.0))
            parts.append(box(start, y + 4, end - start, 18, 'fill="var(--c0)"', f"{label}: {words}"))
            parts += [text(left - 8, y + 17, label, "end"), text(end + 6, y + 17, words)]
        parts.append(text((left + WIDTH - 80) / 2, bottom + 40, self.x_label, "middle", "soft"))
        return document(self.title, WIDTH, bottom + 52, parts)


def _axes(x: Scale, y: Scale, x_label: str, y_label: str) -> list[str]:
    parts = list[str]()
    for tick in x.ticks():
        parts.append(line(x(tick), y.start_px, x(tick), y.end_px))
        parts.append(text(x(tick), y.start_px + 18, number(tick), "middle", "soft"))
    for tick in y.ticks():
        parts.append(line(x.start_px, y(tick), x.end_px, y(tick)))
        parts.append(text(x.start_px - 8, y(tick) + 4, number(tick), "end", "soft"))
    parts.append(text((x.start_px + x.end_px) / 2, y.start_px + 40, x_label, "middle", "soft"))
    parts.append(text(18, (y.start_px + y.end_px) / 2, y_label, "middle", "soft", rotate=True))
    return parts


def _curve(index: int, series: Series, drawn: list[tuple[Point, str]], x: Scale, y: Scale) -> list[str]:
    places = [(x(px), y(py), name) for (px, py), name in drawn]
    parts = list[str]()
    if series.shape != "dots" and places:
        parts.append(f'<path d="{_path(places, series.shape == "step")}" class="curve" {_stroke(index)}/>')
    if series.shape == "dots" or (series.shape == "line" and len(places) <= NUM_HOVERS):
        for px, py, name in places:
            parts.append(f'<g transform="translate({px:.1f} {py:.1f})">{_dot(index, name)}</g>')
    return parts


def _path(places: list[tuple[float, float, str]], is_step: bool) -> str:
    """Return a curve through the places; those that the eye could not tell from the one before are passed over."""
    at_x, at_y, _ = places[0]
    pieces = [f"M{at_x:.1f} {at_y:.1f}"]
    for i, (px, py, _) in enumerate(places[1:], start=2):
        if i < len(places) and abs(px - at_x) < CLOSE_PX and abs(py - at_y) < CLOSE_PX:
            continue
        pieces.append(f"H{px:.1f}V{py:.1f}" if is_step else f"L{px:.1f} {py:.1f}")
        at_x, at_y = px, py
    return "".join(pieces)


def _stroke(index: int) -> str:
    dash = DASHES[index % len(DASHES)]
    return f'stroke="var(--c{index % NUM_COLORS})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _dot(index: int, name: str = "") -> str:
    color = f'fill="var(--c{index % NUM_COLORS})"'
    return box(-3.5, -3.5, 7, 7, color, name) if index % 2 else shape("circle", f'r="4" {color}', name)


def _sample(index: int, series: Series) -> str:
    dot = f'<g transform="translate(12 6)">{_dot(index)}</g>' if series.shape != "step" else ""
    stroke = f'<path d="M0 6H24" class="curve" {_stroke(index)}/>' if series.shape != "dots" else ""
    return stroke + dot
