"""Timelines, parsed back from what was drawn: every GPU-second is drawn or said not to be, none twice."""

import json
import math
import re
from collections import defaultdict
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings, strategies as st
from twinpool.cluster.sizing.chrome_trace import chrome_trace
from twinpool.cluster.sizing.lanes import Phase, View, check_bars, coalesce, request_phases
from twinpool.cluster.sizing.result import Bar, BarKind, Outcome, Run
from twinpool.cluster.sizing.timeline import LEFT, RIGHT, WIDTH, timeline_svg
from twinpool.cluster.sizing.timeline_text import timeline_text
from twinpool.cluster.sizing.workload import Request

SVG = "{http://www.w3.org/2000/svg}"
KINDS: tuple[BarKind, ...] = ("prefill", "decode", "fused", "transfer")


def bar(resource: str, kind: BarKind, start_s: float, end_s: float, passes: int = 1, ids: tuple[str, ...] = ()) -> Bar:
    return Bar(resource, kind, start_s, end_s, passes, 0, passes, ids)


def run_of(bars: list[Bar], policy: str = "shared", outcomes: list[Outcome] | None = None) -> Run:
    busy_s = defaultdict[str, float](float)
    for one in bars:
        busy_s[one.resource] += one.duration_s
    end_s = max((one.end_s for one in bars), default=0.0)
    return Run(policy, outcomes or [], {}, len(busy_s), end_s, bars, dict(busy_s))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A run of up to three resources whose bars follow one another, with and without breaks."""
    bars = list[Bar]()
    for resource in draw(st.lists(st.sampled_from(["normal-0", "normal-10", "a→b"]), min_size=1, unique=True)):
        at_s = 0.0
        for kind, idle_ms, busy_ms, passes in draw(
            st.lists(
                st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(1, 40), st.integers(1, 9)),
                min_size=1,
                max_size=12,
            )
        ):
            start_s = at_s + idle_ms * 1e-3
            at_s = start_s + busy_ms * 1e-3
            bars.append(bar(resource, kind, start_s, at_s, passes))
    return run_of(bars)


def rectangles(svg: str, css: str = "bar") -> dict[float, list[tuple[float, float]]]:
    """Return each lane's drawn (start, width) in pixels, by rising start; a lane is known by its height."""
    lanes = defaultdict[float, list[tuple[float, float]]](list)
    for element in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if element.get("class") == css:
            lanes[float(element.attrib["y"])].append((float(element.attrib["x"]), float(element.attrib["width"])))
    return {y: sorted(lane) for y, lane in lanes.items()}


def words(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def s_per_px(svg: str) -> float:
    """Return the scale of the time axis, read off its labelled ticks."""
    ticks = list[tuple[float, float]]()
    for element in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        if element.get("text-anchor") == "middle" and re.fullmatch(r"[\d.,]+", element.text or ""):
            ticks.append((float(element.attrib["x"]), float((element.text or "").replace(",", ""))))
    (unit,) = (word.removeprefix("time, ") for word in words(svg) if word.startswith("time, "))
    (first_px, first), *_, (last_px, last) = ticks
    return (last - first) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[unit] / (last_px - first_px)


def hovers(svg: str, css: str = "bar") -> list[str]:
    found = [element for element in ElementTree.fromstring(svg).iter(f"{SVG}rect") if element.get("class") == css]
    return [element.findtext(f"{SVG}title") or "" for element in found]


def not_drawn_s(texts: list[str]) -> float:
    return sum(float(found.replace(",", "")) for text in texts for found in re.findall(r"not drawn ([\d,.]+) \(", text))


def complete(trace: str, process: str) -> list[dict[str, Any]]:
    """Return the X events of the one process whose name holds `process`."""
    events = json.loads(trace)["traceEvents"]
    (pid,) = {e["pid"] for e in events if e["name"] == "process_name" and process in e["args"]["name"]}
    return [event for event in events if event["ph"] == "X" and event["pid"] == pid]


@settings(max_examples=60, deadline=None)
@given(runs(), st.integers(0, 200), st.integers(1, 400), st.integers(3, 40))
def test_svg_accounts_for_every_gpu_second_and_books_nothing_twice(
    run: Run, start_ms: int, span_ms: int, max_bars: int
) -> None:
    """Through any window and any limit: the drawn lengths and what is said not to be drawn are all there is."""
    svg = timeline_svg("t", [run], View(start_ms * 1e-3, (start_ms + span_ms) * 1e-3, max_bars))
    lanes = rectangles(svg)
    if not lanes:
        assert "no pass in this time" in words(svg)
        return
    for lane in lanes.values():
        for (start, width), (following, _) in pairwise(lane):
            assert start + width <= following + 0.02
    drawn_s = sum(width for lane in lanes.values() for _, width in lane) * s_per_px(svg)
    assert drawn_s + not_drawn_s(words(svg)) == pytest.approx(run.gpu_s, rel=1e-3, abs=6e-4)


@settings(max_examples=60, deadline=None)
@given(runs())
def test_chrome_trace_accounts_for_every_gpu_second_to_the_nanosecond(run: Run) -> None:
    events = complete(chrome_trace([run]), "resources")
    assert sum(event["dur"] for event in events) == pytest.approx(run.gpu_s * 1e6, abs=1e-3 * len(events))
    assert sum(event["args"]["passes"] for event in events) == sum(one.num_passes for one in run.bars)
    threads = defaultdict[int, list[tuple[int, int]]](list)
    for event in events:
        threads[event["tid"]].append((round(event["ts"] * 1e3), round(event["dur"] * 1e3)))
    for thread in threads.values():
        assert all(ts + dur <= following for (ts, dur), (following, _) in pairwise(sorted(thread)))


@settings(max_examples=60, deadline=None)
@given(runs(), st.integers(40, 160))
def test_terminal_lanes_fit_and_their_seconds_add_up(run: Run, width: int) -> None:
    lines = timeline_text(run, width)
    assert all(len(line) <= width for line in lines)
    lanes = [line for line in lines if re.search(r"\d s +\d+%$", line)]
    total_s = sum(float(re.findall(r"([\d.]+) s +\d+%$", line)[0]) for line in lanes)
    assert len(lanes) == len(run.busy_s)
    assert total_s == pytest.approx(run.gpu_s, abs=0.0006 * len(lanes))
    assert any(f"{run.gpu_s:.3f} GPU-seconds" in line for line in lines)


def test_terminal_columns_show_what_took_their_time() -> None:
    bars = [bar("normal-0", "prefill", 0.0, 0.5), bar("normal-0", "decode", 0.5, 1.0, passes=96)]
    lines = timeline_text(run_of(bars), 8 + 1 + 40 + 17)
    assert lines[1] == "normal-0 " + "█" * 20 + "▒" * 8 + "×96" + "▒" * 9 + "    1.000 s 100%"
    assert lines[2] == "█ prefill  ▒ decode  ×N passes"


def test_the_worked_example_is_drawn_as_computed() -> None:
    """Two prefills of 64 tokens, a decode, the long prefill from 109 to 255 ms, and then 96 decode steps as one bar."""
    overhead_s, per_token_s, step_s = 31.914e-3, 55.444e-6, 38.283e-3
    short_s, long_s = overhead_s + 64 * per_token_s, overhead_s + 2048 * per_token_s
    bars, at_s = list[Bar](), 0.0
    steps = [("prefill", short_s, ("A",)), ("prefill", short_s, ("B",)), ("decode", step_s, ("A", "B"))]
    steps += [("prefill", long_s, ("N",)), *[("decode", step_s, ("A", "B", "N"))] * 95, ("decode", step_s, ("N",))]
    for kind, length_s, ids in steps:
        bars.append(bar("normal-0", kind, at_s, at_s + length_s, 1, ids))
        at_s += length_s
    svg = timeline_svg("t", [run_of(bars)])
    assert [len(lane) for lane in rectangles(svg).values()] == [5]
    assert "×96" in words(svg)
    long, last = hovers(svg)[3:]
    assert "prefill ×1, 109.2 to 254.7 ms" in long
    assert "decode ×96" in last
    assert "A, B, N" in last
    assert "38.28 ms each" in last


def test_overlaps_and_missing_seconds_are_found() -> None:
    good = [bar("n", "prefill", 0.0, 1.0), bar("n", "decode", 1.0, 2.0), bar("m", "decode", 0.5, 1.5)]
    check_bars(run_of(good))
    with pytest.raises(AssertionError, match="n is booked twice"):
        check_bars(run_of([*good, bar("n", "fused", 1.9, 2.5)]))
    lost = run_of(good)
    lost.busy_s["n"] += 0.25
    with pytest.raises(AssertionError, match=r"the bars of n add up to 2.0 s, not to the 2.25 s"):
        check_bars(lost)
    unkept = run_of([])
    unkept.busy_s["n"] = 1.0
    with pytest.raises(AssertionError, match="the bars of n"):
        check_bars(unkept)


def test_only_decode_without_a_break_is_joined() -> None:
    bars = [
        bar("n", "decode", 0.0, 1.0, 2, ("a",)),
        bar("n", "decode", 1.0, 2.0, 3, ("a", "b")),
        bar("n", "decode", 2.1, 3.0),
        bar("n", "prefill", 3.0, 4.0),
        bar("n", "prefill", 4.0, 5.0),
        bar("m", "decode", 5.0, 6.0),
        bar("n", "decode", 6.0, 7.0),
    ]
    joined = coalesce(bars)
    assert joined == [Bar("n", "decode", 0.0, 2.0, 5, 0, 5, ("a", "b")), *bars[2:]]


def test_a_bar_over_the_edge_is_cut_and_counted() -> None:
    """A decode that runs through the whole window is drawn, as long as the window is."""
    run = run_of([bar("n", "decode", 0.0, 10.0, 100)])
    svg = timeline_svg("t", [run], View(4.0, 6.0))
    ((_, width),) = rectangles(svg).popitem()[1]
    assert width == pytest.approx(WIDTH - LEFT - RIGHT)
    assert not_drawn_s(words(svg)) == 8.0


def test_runs_share_one_axis() -> None:
    svg = timeline_svg("t", [run_of([bar("n", "prefill", 0.0, 1.0)]), run_of([bar("m", "prefill", 0.0, 4.0)], "b")])
    (_, short), (_, long) = (lane[0] for lane in rectangles(svg).values())
    assert long == pytest.approx(4 * short, abs=0.05)


def test_a_life_of_a_request_has_no_holes() -> None:
    """Queue, prefill, transfer, decode, a gap behind another's prefill, decode: from its arrival to its last token."""
    outcome = Outcome(Request("a", 1.0, 64, 4), prefill_end_s=3.0, is_finished=True)
    bars = [
        bar("prompt-0", "prefill", 2.0, 3.0, 1, ("a",)),
        bar("p→c", "transfer", 2.2, 3.5, 1, ("a",)),
        bar("c", "decode", 3.6, 4.0, 2, ("a", "b")),
        bar("c", "prefill", 4.0, 5.0, 1, ("b",)),
        bar("c", "fused", 5.0, 5.5, 1, ("a", "b")),
    ]
    (phases,) = request_phases(run_of(bars), [outcome])
    expected = [("queue", 1, 2), ("prefill", 2, 3), ("transfer", 3, 3.5), ("gap", 3.5, 3.6), ("decode", 3.6, 4)]
    assert phases == [Phase(*phase) for phase in [*expected, ("gap", 4, 5), ("decode", 5, 5.5)]]


def test_request_lanes_are_limited_aloud() -> None:
    outcomes = [Outcome(Request(f"r{i}", 0.0, 8, 2), prefill_end_s=1.0) for i in range(5)]
    run = run_of([bar("n", "prefill", 0.5, 1.0, 1, tuple(f"r{i}" for i in range(5)))], outcomes=outcomes)
    svg = timeline_svg("t", [run], View(max_requests=3))
    assert [len(lane) for lane in rectangles(svg, "phase").values()] == [2, 2, 2]
    assert "without a lane: 2 more requests" in words(svg)
    assert any("prefill ×1" in hover for hover in hovers(svg))
    (event,) = complete(chrome_trace([run]), "resources")
    assert event["args"]["requests"] == "r0, r1, r2, r3, r4"


def test_hostile_names_stay_text() -> None:
    run = run_of([bar("<b>&\"'", "prefill", 0.0, 1.0, 1, ("</title><script>",))])
    assert "<b>&\"'" in words(timeline_svg("<&>", [run]))
    assert "</title><script>" in hovers(timeline_svg("<&>", [run]))[0]
    names = [event["args"].get("name") for event in json.loads(chrome_trace([run]))["traceEvents"]]
    assert "<b>&\"'" in names


def test_chrome_trace_names_its_lanes() -> None:
    """Each process and thread has a name and a place, which is what Perfetto sorts by."""
    trace = json.loads(chrome_trace([run_of([bar("n", "decode", 0.0, 0.5, 3)], policy) for policy in ("x", "y")]))
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    processes = [event["args"]["name"] for event in metadata if event["name"] == "process_name"]
    assert processes == ["x: resources", "x: requests (first 0 of 0)", "y: resources", "y: requests (first 0 of 0)"]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert (event["ts"], event["dur"], event["name"]) == (0.0, 500_000.0, "decode ×3")
            assert any(m["name"] == "thread_name" and m["tid"] == event["tid"] for m in metadata)


@pytest.mark.parametrize("view", [View(), View(start_s=50.0), View(start_s=0.0, end_s=0.0)])
def test_a_time_without_passes_says_so(view: View) -> None:
    run = run_of([] if view == View() else [bar("n", "prefill", 1.0, 2.0)])
    assert "no pass in this time" in words(timeline_svg("t", [run], view))
    assert timeline_text(run, 80, view) == ["shared: no pass in this time"]


def test_units_of_time_follow_the_span() -> None:
    spans = {5e-4: "time, µs", 1.5: "time, ms", 90.0: "time, s", 3600.0: "time, min"}
    for span_s, label in spans.items():
        assert label in words(timeline_svg("t", [run_of([bar("n", "prefill", 0.0, span_s)])]))
    assert not math.isinf(View().max_bars)
