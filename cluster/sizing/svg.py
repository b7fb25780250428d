"""The few SVG pieces that every picture here is made of: document, text, boxes, scales with round ticks.

Colours are CSS variables with a light and a dark set, so that a picture fits the page or viewer it is shown in. No ids
and no external resources: any number of pictures can stand in one page, or each alone in a file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

NUM_COLORS = 8
LIGHT = ("#0b63c4", "#c94a00", "#1f7a34", "#8a2fa8", "#c2255c", "#067a86", "#7d6200", "#5c5f66")
DARK = ("#6cb2ff", "#ff9d5c", "#69d083", "#d49bea", "#ff8fb3", "#5cd3df", "#e2c04c", "#b3b8c0")


def _variables(colors: Sequence[str], others: str) -> str:
    return "svg.tp{" + "".join(f"--c{i}:{color};" for i, color in enumerate(colors)) + others + "}"


STYLE = (
    _variables(LIGHT, "--ink:#1f2328;--soft:#59636e;--line:#d1d9e0;--page:#ffffff;--heat:#3d8bfd;")
    + "@media (prefers-color-scheme:dark){"
    + _variables(DARK, "--ink:#f0f6fc;--soft:#9198a1;--line:#3d444d;--page:#0d1117;--heat:#1158c7;")
    + "}svg.tp{background:var(--page);font:12px system-ui,sans-serif;max-width:100%;height:auto}"
    "svg.tp text{fill:var(--ink)}svg.tp .soft{fill:var(--soft)}"
    "svg.tp .halo{paint-order:stroke;stroke:var(--page);stroke-width:4px}"
    "svg.tp .on{fill:var(--page)}"
    "svg.tp .title{font-size:15px;font-weight:600}"
    "svg.tp .grid{stroke:var(--line);stroke-width:1}svg.tp .curve{fill:none;stroke-width:2}"
    "svg.tp .limit{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:6 4}"
)


def document(title: str, width: int, height: float, parts: Iterable[str]) -> str:
    """Return a whole SVG; `title` is drawn, and is its accessible name."""
    name = escape(title)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tp" role="img" aria-label="{name}" '
        f'width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}"><style>{STYLE}</style>'
    )
    return "".join((head, text(12, 22, title, "start", "title"), *parts, "</svg>\n"))


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "", rotate: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if rotate else ""
    named = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{turned}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str = "grid") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def shape(tag: str, attributes: str, hover: str = "") -> str:
    """Return an element; `hover` is what a pointer or a screen reader is told about it."""
    return f"<{tag} {attributes}><title>{escape(hover)}</title></{tag}>" if hover else f"<{tag} {attributes}/>"


def box(x: float, y: float, width: float, height: float, attributes: str, hover: str = "") -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return shape("rect", f"{place} {attributes}", hover)


def legend(y: float, entries: Sequence[tuple[str, str]], width: float) -> tuple[list[str], float]:
    """Return the parts of a legend of (sample drawn in 24 by 12 at the origin, label), and the y below it."""
    parts, x = list[str](), 12.0
    for sample, label in entries:
        needed = 50 + 7.4 * len(label)  # wide enough for the widest of the usual fonts
        if x > 12 and x + needed > width:
            x, y = 12.0, y + 18
        parts.append(f'<g transform="translate({x:.1f} {y - 10:.1f})">{sample}</g>' + text(x + 30, y, label))
        x += needed
    return parts, y + 18 if entries else y


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels, linearly or by their logarithm."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start_px + (at - low) / (high - low) * (self.end_px - self.start_px)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def scale_over(values: Sequence[float], px: tuple[float, float], log: bool = False, zero: bool = False) -> Scale:
    """Return a scale that holds all values and ends on round ones; `zero`: it starts no higher than 0."""
    low, high = min(values), max(values)
    if log:
        low, high = 10 ** floor(log10(low)), 10 ** ceil(log10(high))
        return Scale(low, high if high > low else low * 10, *px, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high == low:
        low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1.0)
    step = _step(low, high)
    return Scale(floor(low / step + 1e-9) * step, ceil(high / step - 1e-9) * step, *px)


def linear_ticks(low: float, high: float, num_wanted: int = 6) -> list[float]:
    """Return round values from low to high, about `num_wanted` of them."""
    step = _step(low, high, num_wanted)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten from low to high; with fewer than three decades, their doubles and fivefolds too."""
    decades = range(floor(log10(low) + 1e-9), ceil(log10(high) - 1e-9) + 1)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,)
    values = [factor * 10.0**decade for decade in decades for factor in factors]
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def _step(low: float, high: float, num_wanted: int = 6) -> float:
    raw = (high - low) / num_wanted
    power = 10.0 ** floor(log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def number(value: float) -> str:
    """Write a tick's value: `0.05`, `12`, `12,000`, `3e-06`."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.6g}"
