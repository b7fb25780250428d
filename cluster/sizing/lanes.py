"""What a timeline shows: one lane of bars for each resource or request, and what was left out of it. Draws nothing.

Keeps the two promises of every drawing: all busy seconds of a run are either in a lane's bars or in what the lane says
it left out, and no two bars of one resource overlap.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isclose
from typing import Literal

from .result import Bar, Outcome, Run

TOUCHING_S = 1e-9  # two bars are without a break when the clock's own rounding lies between them
PhaseKind = Literal["queue", "prefill", "transfer", "decode", "gap"]
NUM_NAMED_REQUESTS = 6  # of one bar


@dataclass(frozen=True)
class View:
    """Which part of a run to draw. A bar that reaches over its edge is cut there."""

    start_s: float = 0.0
    end_s: float = inf
    max_bars: int = 3000  # in each run
    max_requests: int = 0  # lanes of single requests

    def shown_s(self, bar: Bar) -> float:
        return max(0.0, min(bar.end_s, self.end_s) - max(bar.start_s, self.start_s))


@dataclass(frozen=True)
class Lane:
    name: str
    busy_s: float  # all of the run's
    bars: Sequence[Bar]
    num_bars_cut: int = 0  # left out, wholly or in part
    left_out_s: float = 0.0


@dataclass(frozen=True)
class Phase:
    kind: PhaseKind
    start_s: float
    end_s: float


def check_bars(run: Run) -> None:
    """Assert that no resource does two things at once and that the bars add up to the busy time the run claims."""
    by_resource = _by_resource(run.bars)
    for resource in resources_of(run):
        bars = by_resource.get(resource, [])
        assert all(bar.end_s >= bar.start_s for bar in bars), f"{resource} has a bar of negative length"
        for before, after in pairwise(bars):
            assert before.end_s <= after.start_s + TOUCHING_S, f"{resource} is booked twice: {before} and {after}"
        total_s, claimed_s = sum(bar.duration_s for bar in bars), run.busy_s.get(resource, 0.0)
        assert isclose(total_s, claimed_s, rel_tol=1e-6, abs_tol=1e-9), (
            f"the bars of {resource} add up to {total_s} s, not to the {claimed_s} s that it was busy"
        )


def fit(runs: Iterable[Run], view: View) -> View:
    """Return the view, cut short where any run's bars become too many, or where the last of them ends."""
    end_s, last_s = view.end_s, view.start_s
    for run in runs:
        shown = sorted((bar for bar in _coalesced(run) if view.shown_s(bar)), key=lambda bar: bar.start_s)
        if len(shown) > view.max_bars:
            end_s = min(end_s, shown[view.max_bars].start_s)
        last_s = max(last_s, max((bar.end_s for bar in shown), default=0.0))
    return replace(view, end_s=min(end_s, last_s))


def make_lanes(run: Run, view: View) -> list[Lane]:
    """Return a lane for each resource, workers first; decode steps that follow without a break are one bar, ×N."""
    lanes, by_resource = list[Lane](), _by_resource(run.bars)
    for resource in resources_of(run):
        bars = coalesce(by_resource.get(resource, []))
        left_out_s = [bar.duration_s - view.shown_s(bar) for bar in bars]
        cut_s = [seconds for seconds in left_out_s if seconds > TOUCHING_S]
        shown = [bar for bar in bars if view.shown_s(bar)]
        lanes.append(Lane(resource, run.busy_s.get(resource, 0.0), shown, len(cut_s), sum(cut_s)))
    return lanes


def resources_of(run: Run) -> list[str]:
    """Return the names of all resources: PROMPT workers, other workers, links; worker-10 behind worker-9."""
    return sorted({*run.busy_s, *(bar.resource for bar in run.bars)}, key=_natural)


def named_requests(bar: Bar) -> str:
    named, more = bar.request_ids[:NUM_NAMED_REQUESTS], len(bar.request_ids) - NUM_NAMED_REQUESTS
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def account(run: Run, lanes: Sequence[Lane], view: View) -> str:
    """Say in one line where a run's GPU-seconds are: by kind, and what of them the lanes leave out."""
    by_kind = dict[str, float]()
    for bar in (bar for lane in lanes for bar in lane.bars):
        by_kind[bar.kind] = by_kind.get(bar.kind, 0.0) + view.shown_s(bar)
    parts = [f"{kind} {busy_s:,.3f}" for kind, busy_s in sorted(by_kind.items())]
    num_cut, left_out_s = sum(lane.num_bars_cut for lane in lanes), sum(lane.left_out_s for lane in lanes)
    if num_cut:
        parts.append(f"not drawn {left_out_s:,.3f} ({num_cut:,} bars, wholly or in part)")
    return f"{run.gpu_s:,.3f} GPU-seconds = {' + '.join(parts) or 'none'}"


def request_phases(run: Run, outcomes: Sequence[Outcome]) -> list[list[Phase]]:
    """Return each request's life: the bars that name it, and its waiting in between (queue, then gaps)."""
    wanted = {outcome.request.request_id for outcome in outcomes}
    bars = defaultdict[str, list[Bar]](list)
    for bar in sorted(run.bars, key=lambda bar: bar.start_s):
        for request_id in wanted.intersection(bar.request_ids):
            bars[request_id].append(bar)
    return [_phases(outcome, bars[outcome.request.request_id], run.end_s) for outcome in outcomes]


def coalesce(bars: Iterable[Bar]) -> list[Bar]:
    """Join decode bars that follow one another without a break, whoever takes part; the order of bars is kept."""
    groups = list[list[Bar]]()
    for bar in bars:
        before = groups[-1][-1] if groups else None
        if before is not None and bar.kind == before.kind == "decode" and _follows(before, bar):
            groups[-1].append(bar)
        else:
            groups.append([bar])
    return [_joined(group) if len(group) > 1 else group[0] for group in groups]


def _follows(before: Bar, bar: Bar) -> bool:
    return before.resource == bar.resource and abs(bar.start_s - before.end_s) <= TOUCHING_S


def _joined(group: list[Bar]) -> Bar:
    return replace(
        group[0],
        end_s=group[-1].end_s,
        num_passes=sum(bar.num_passes for bar in group),
        num_prefill_tokens=sum(bar.num_prefill_tokens for bar in group),
        num_decode_tokens=sum(bar.num_decode_tokens for bar in group),
        request_ids=tuple(dict.fromkeys(request_id for bar in group for request_id in bar.request_ids)),
    )


def _coalesced(run: Run) -> list[Bar]:
    return [bar for bars in _by_resource(run.bars).values() for bar in coalesce(bars)]


def _by_resource(bars: Iterable[Bar]) -> dict[str, list[Bar]]:
    grouped = defaultdict[str, list[Bar]](list)
    for bar in bars:
        grouped[bar.resource].append(bar)
    return {name: sorted(group, key=lambda bar: (bar.start_s, bar.end_s)) for name, group in grouped.items()}


def _natural(resource: str) -> tuple[bool, bool, list[tuple[int, str]]]:
    parts = [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", resource)]
    return "→" in resource, not resource.startswith("prompt"), parts


def _phases(outcome: Outcome, bars: list[Bar], run_end_s: float) -> list[Phase]:
    """Follow one request: passes first, a transfer where no pass runs meanwhile, and waiting for the rest."""
    phases, at_s = list[Phase](), outcome.request.arrival_s
    transfers = [bar for bar in bars if bar.kind == "transfer"]
    for bar in bars:
        if bar.kind == "transfer":
            continue
        _fill(phases, transfers, at_s, bar.start_s)
        is_decode = bar.kind == "decode" or bar.start_s + TOUCHING_S >= (outcome.prefill_end_s or inf)
        _add(phases, "decode" if is_decode and bar.kind != "prefill" else "prefill", bar.start_s, bar.end_s)
        at_s = bar.end_s
    waits_on = outcome.refused is None and not outcome.is_finished
    _fill(phases, transfers, at_s, run_end_s if waits_on else max((bar.end_s for bar in transfers), default=at_s))
    return phases


def _fill(phases: list[Phase], transfers: list[Bar], at_s: float, until_s: float) -> None:
    for bar in transfers:
        if bar.end_s > at_s and bar.start_s < until_s:
            _add(phases, "gap" if phases else "queue", at_s, bar.start_s)
            _add(phases, "transfer", max(at_s, bar.start_s), min(until_s, bar.end_s))
            at_s = min(until_s, bar.end_s)
    _add(phases, "gap" if phases else "queue", at_s, until_s)


def _add(phases: list[Phase], kind: PhaseKind, start_s: float, end_s: float) -> None:
    if end_s - start_s <= TOUCHING_S:
        return
    if kind == "decode" and phases and phases[-1].kind == kind and start_s - phases[-1].end_s <= TOUCHING_S:
        phases[-1] = replace(phases[-1], end_s=end_s)
    else:
        phases.append(Phase(kind, start_s, end_s))
