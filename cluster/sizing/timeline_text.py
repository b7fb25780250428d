"""Draws a run in characters: a lane for each resource, for terminals. What the lanes hold is decided in lanes.py."""

from collections.abc import Sequence
from textwrap import wrap

from .lanes import View, account, fit, make_lanes
from .result import Bar, Run
from .svg import number
from .timeline import unit_of

GLYPHS = {"prefill": "█", "decode": "▒", "fused": "▓", "transfer": "═"}


def timeline_text(run: Run, width: int = 100, view: View | None = None) -> list[str]:
    """Draw a run in lines of at most `width` characters; a column shows what took most of its time."""
    view = fit([run], view or View())
    lanes = make_lanes(run, view)
    name_width = max((len(lane.name) for lane in lanes), default=0)
    num_columns = max(10, width - name_width - 18)
    if view.end_s <= view.start_s:
        return [f"{run.policy}: no pass in this time"]
    s_per_column = (view.end_s - view.start_s) / num_columns
    unit, unit_s = unit_of(view.end_s - view.start_s)
    head = f"{run.policy}: {number(view.start_s / unit_s)} to {view.end_s / unit_s:,.4g} {unit}, "
    lines = [(head + f"{s_per_column / unit_s:,.3g} {unit} a column")[:width]]
    for lane in lanes:
        cells = _cells(lane.bars, view, num_columns)
        share = lane.busy_s / run.end_s if run.end_s > 0 else 0.0
        lines.append(f"{lane.name:<{name_width}} {cells} {lane.busy_s:8.3f} s {share:4.0%}")
    kinds = {bar.kind for lane in lanes for bar in lane.bars}
    legend = "  ".join([*(f"{glyph} {kind}" for kind, glyph in GLYPHS.items() if kind in kinds), "×N passes"])
    return [*lines, *wrap(legend, width), *wrap(account(run, lanes, view), width)]


def _cells(bars: Sequence[Bar], view: View, num_columns: int) -> str:
    s_per_column = (view.end_s - view.start_s) / num_columns
    most, cells = [0.0] * num_columns, [" "] * num_columns
    labels = list[tuple[int, str]]()
    for bar in bars:
        first = max(0, int((bar.start_s - view.start_s) / s_per_column))
        last = min(num_columns - 1, int((bar.end_s - view.start_s) / s_per_column))
        for column in range(first, last + 1):
            left_s = view.start_s + column * s_per_column
            covered_s = min(bar.end_s, left_s + s_per_column) - max(bar.start_s, left_s)
            if covered_s > most[column]:
                most[column], cells[column] = covered_s, GLYPHS[bar.kind]
        label = f"×{bar.num_passes}"
        if bar.num_passes > 1 and last - first > len(label) + 2:
            labels.append(((first + last - len(label) + 1) // 2, label))
    for at, label in labels:
        cells[at : at + len(label)] = label
    return "".join(cells)
