"""Draws runs as SVG: a lane for each resource, a bar for each pass, and on request a lane for each request.

What the lanes hold is decided in lanes.py; the picture says how many GPU-seconds of a run it shows and how many not.
"""

from collections.abc import Sequence

from .lanes import Phase, View, account, fit, make_lanes, named_requests, request_phases
from .result import Bar, Run
from .svg import box, document, legend, line, linear_ticks, number, text
from .units import counted

WIDTH, LEFT, RIGHT = 1040, 150, 150
LANE_HEIGHT, REQUEST_HEIGHT = 24, 12
COLORS = {"prefill": "c1", "decode": "c0", "fused": "c3", "transfer": "c2", "queue": "line", "gap": "c4"}
MEANINGS = {"fused": "prefill and decode in one pass", "queue": "waiting for prefill", "gap": "waiting for a token"}
UNITS = ((1e-3, "µs", 1e-6), (2.0, "ms", 1e-3), (600.0, "s", 1.0), (float("inf"), "min", 60.0))  # by the span


def timeline_svg(title: str, runs: Sequence[Run], view: View | None = None) -> str:
    """Draw the runs below one another over one axis of time."""
    view = fit(runs, view or View())
    if view.end_s <= view.start_s:
        return document(title, WIDTH, 80, [text(WIDTH / 2, 50, "no pass in this time", "middle", "soft")])
    axis = _Axis(view)
    panels, kinds, y = list[str](), set[str](), 72.0
    for run in runs:
        parts, used, y = _panel(run, view, axis, y)
        panels += parts
        kinds |= used
    entries = [(box(0, 0, 24, 12, _fill(kind)), _meaning(kind)) for kind in COLORS if kind in kinds]
    return document(title, WIDTH, y + 44, [*legend(46, entries, WIDTH)[0], *axis.draw(64, y), *panels])


def unit_of(span_s: float) -> tuple[str, float]:
    """Return the unit in which a span of time reads well, and its seconds."""
    return next((name, seconds) for below_s, name, seconds in UNITS if span_s < below_s)


class _Axis:
    def __init__(self, view: View) -> None:
        self.start_s, self.end_s = view.start_s, view.end_s
        self.unit, self.unit_s = unit_of(view.end_s - view.start_s)

    def x(self, at_s: float) -> float:
        """Return the place of a time; what lies before or after the axis is cut off at its end."""
        at_s = min(self.end_s, max(self.start_s, at_s))
        return LEFT + (at_s - self.start_s) / (self.end_s - self.start_s) * (WIDTH - LEFT - RIGHT)

    def draw(self, top: float, bottom: float) -> list[str]:
        parts = list[str]()
        for tick in linear_ticks(self.start_s / self.unit_s, self.end_s / self.unit_s, 8):
            x = self.x(tick * self.unit_s)
            parts += [line(x, top, x, bottom), text(x, bottom + 16, number(tick), "middle", "soft")]
        return [*parts, text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, f"time, {self.unit}", "middle", "soft")]


def _panel(run: Run, view: View, axis: _Axis, y: float) -> tuple[list[str], set[str], float]:
    """Return one run's part of the picture, the kinds in it, and the y below it."""
    lanes = make_lanes(run, view)
    kinds, parts = set[str](), [text(12, y + 16, run.policy, css="title")]
    parts.append(text(LEFT, y + 16, account(run, lanes, view), css="soft"))
    y += 26
    for lane in lanes:
        share = f", {lane.busy_s / run.end_s:.0%}" if run.end_s > 0 else ""
        parts.append(text(LEFT - 8, y + 16, _short(lane.name), "end"))
        parts.append(text(WIDTH - RIGHT + 8, y + 16, f"busy {lane.busy_s:,.3f} s{share}", css="soft"))
        parts += [part for bar in lane.bars for part in _draw_bar(bar, axis, y)]
        kinds |= {bar.kind for bar in lane.bars}
        y += LANE_HEIGHT
    shown = run.outcomes[: view.max_requests]
    for outcome, phases in zip(shown, request_phases(run, shown), strict=True):
        parts.append(text(LEFT - 8, y + 9, _short(outcome.request.request_id), "end", "soft"))
        parts += [_draw_phase(phase, outcome.request.request_id, axis, y) for phase in phases if _visible(phase, axis)]
        kinds |= {phase.kind for phase in phases if _visible(phase, axis)}
        y += REQUEST_HEIGHT
    if shown and len(shown) < len(run.outcomes):
        parts.append(
            text(LEFT, y + 12, f"without a lane: {counted(len(run.outcomes) - len(shown), 'more request')}", css="soft")
        )
        y += 18
    return parts, kinds, y + 14


def _draw_bar(bar: Bar, axis: _Axis, y: float) -> list[str]:
    x, width = axis.x(bar.start_s), axis.x(bar.end_s) - axis.x(bar.start_s)
    edge = ' stroke="var(--page)" stroke-width="0.5"' if width > 3 else ""
    parts = [box(x, y + 2, width, LANE_HEIGHT - 4, f'class="bar" {_fill(bar.kind)}{edge}', _describe(bar))]
    label = f"×{bar.num_passes}"
    if bar.num_passes > 1 and width > 8 * len(label):
        parts.append(text(x + width / 2, y + 16, label, "middle", "on"))
    return parts


def _draw_phase(phase: Phase, request_id: str, axis: _Axis, y: float) -> str:
    words = f"{request_id}: {_meaning(phase.kind)}, {(phase.end_s - phase.start_s) * 1e3:,.1f} ms"
    x = axis.x(phase.start_s)
    return box(x, y + 1, axis.x(phase.end_s) - x, REQUEST_HEIGHT - 3, f'class="phase" {_fill(phase.kind)}', words)


def _visible(phase: Phase, axis: _Axis) -> bool:
    return phase.end_s > axis.start_s and phase.start_s < axis.end_s


def _describe(bar: Bar) -> str:
    each = f", {bar.duration_s / bar.num_passes * 1e3:,.2f} ms each" if bar.num_passes > 1 else ""
    times = f"{bar.start_s * 1e3:,.1f} to {bar.end_s * 1e3:,.1f} ms ({bar.duration_s * 1e3:,.2f} ms{each})"
    tokens = f"{bar.num_prefill_tokens:,} prompt and {bar.num_decode_tokens:,} output tokens"
    return f"{bar.resource}: {bar.kind} ×{bar.num_passes}, {times}; {tokens}; {named_requests(bar)}"


def _fill(kind: str) -> str:
    return f'fill="var(--{COLORS[kind]})"'


def _meaning(kind: str) -> str:
    return f"{kind}: {MEANINGS[kind]}" if kind in MEANINGS else kind


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:9]}…{name[-10:]}"
