"""The HTML page of a validation: errors beside the live run's own repeatability, predicted against measured curves."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from statistics import fmean

from .charts import LineChart, Series, distribution
from .page import Part, Picture, Section, Table, page
from .recording import Recording
from .result import Outcome, Run
from .units import counted, format_s
from .validate import METRICS, PER_REQUEST, Cell, Metric, Validation, is_gated, paired, pools_of

MEASURED, PREDICTED = "measured", "predicted"


def report(validation: Validation, title: str, facts: Sequence[str]) -> str:
    """Return the page; `facts` say what was run, one a line."""
    verdict = "; ".join(validation.reasons) or "no reason to reject the prediction"
    return page(
        title,
        [
            Section("What was compared", [*facts, f"Verdict: {verdict}."]),
            Section("Errors", [errors_table(validation.cells), *_legend(validation)]),
            Section("Single requests", [per_request_table(validation)]),
            Section("Where the TTFT goes, on average", [stages_table(validation)]),
            Section("Distributions", [Picture(_curves(validation, metric).svg()) for metric in METRICS]),
            Section("Request by request", [Picture(_scatter(validation).svg())]),
        ],
    )


def facts_of(validation: Validation, recording: Recording) -> list[str]:
    """Say in a few lines what was run, and the figures that are not times."""
    header, pools = recording.header, pools_of(recording.header.workers)
    facts = [
        f"{pools.num_prompt} PROMPT + {pools.num_completion} COMPLETION workers, "
        f"{counted(len(recording.requests), 'request')} sent {counted(recording.num_runs, 'time')}, at "
        f"{validation.load:.0%} of the capacity by the cost model.",
        f"The load generator fell at most {1000 * header.max_late_s:.1f} ms behind and took at most "
        f"{max(header.client_cpu_shares):.0%} of a core.",
    ]
    for name, unit in (("requests_per_s", "requests/s"), ("output_tokens_per_s", "tokens/s")):
        facts.append(_both(validation, name, lambda value, unit=unit: f"{value:.2f} {unit}"))
    if validation.live_summaries[0].slo is not None:
        facts.append("SLO attainment: " + _both(validation, "slo_attainment", lambda value: f"{value:.1%}"))
    return facts


def _both(validation: Validation, name: str, say: Callable[[float], str]) -> str:
    """Say a figure of the summaries, as the mean over the runs, of each side."""
    sides = ((MEASURED, validation.live_summaries), (PREDICTED, validation.predicted_summaries))
    return ", ".join(
        f"{label} {say(fmean(getattr(summary, name) or 0.0 for summary in summaries))}" for label, summaries in sides
    )


def errors_table(cells: Iterable[Cell]) -> Table:
    rows = [
        [
            f"{cell.metric} {cell.statistic}",
            *(format_s(cell.live_s), format_s(cell.predicted_s), f"{cell.error:+.1%}"),
            "?" if cell.repeatability is None else f"±{cell.repeatability:.1%}",
            "-" if cell.gate is None else f"{cell.gate:.0%}",
            cell.verdict,
        ]
        for cell in cells
    ]
    return Table(("", MEASURED, PREDICTED, "error", "live runs differ by", "gate", "verdict"), rows)


def per_request_table(validation: Validation) -> Table:
    rows = [
        [p.metric, p.num, f"{p.mape:.1%}", f"{p.bias:+.1%}", "-" if p.pearson is None else f"{p.pearson:.3f}"]
        for p in validation.per_request
    ]
    return Table(("", "requests", "mean absolute error", "bias", "correlation"), rows)


def stages_table(validation: Validation) -> Table:
    """The cluster's own clock says how long the prefill took; the rest is waiting and the messages' way."""
    sides = (validation.live_summaries, validation.predicted_summaries)
    prefill_s = [fmean(summary.prefill_s.mean or 0.0 for summary in side) for side in sides]
    ttft_s = [fmean(summary.ttft_s.mean or 0.0 for summary in side) for side in sides]
    rest_s = [whole - part for whole, part in zip(ttft_s, prefill_s, strict=True)]
    rows = [
        [name, format_s(seen), format_s(expected), f"{expected / seen - 1:+.1%}" if seen else "-"]
        for name, (seen, expected) in (("prefill", prefill_s), ("before and after it", rest_s))
    ]
    return Table(("of the TTFT", MEASURED, PREDICTED, "error"), rows)


def _legend(validation: Validation) -> list[Part]:
    gated = (
        "Gates apply at 30 to 70 % load." if is_gated(validation.load) else "No gates: they apply at 30 to 70 % load."
    )
    return [f"{gated} noisy: the live runs differ from each other by more than the gate allows the prediction."]


def _curves(validation: Validation, metric: Metric) -> LineChart:
    sides = ((MEASURED, validation.live), (PREDICTED, validation.predicted))
    series = [distribution(label, [1000 * value for value in _values(runs, metric)]) for label, runs in sides]
    return LineChart(f"{metric}, {MEASURED} and {PREDICTED}", f"{metric}, ms", "share of values", series)


def _values(runs: Iterable[Run], metric: Metric) -> list[float]:
    if metric == "ITL":
        gaps = chain.from_iterable(run.gaps.items() for run in runs)
        return list(chain.from_iterable(repeat(gap_s, count) for gap_s, count in gaps))
    outcomes = chain.from_iterable(run.outcomes for run in runs)
    return [value for outcome in outcomes if (value := PER_REQUEST[metric](outcome)) is not None]


def _scatter(validation: Validation) -> LineChart:
    """A dot a request; on the line the prediction is right."""
    points: list[tuple[float, float]] = []
    names: list[str] = []
    for live, predicted in paired(validation.live, validation.predicted):
        if live.ttft_s is not None and predicted.ttft_s is not None:
            points.append((1000 * live.ttft_s, 1000 * predicted.ttft_s))
            names.append(_name(live, live.ttft_s, predicted.ttft_s))
    end = max(chain.from_iterable(points), default=0.0)
    series = [Series("equal", [(0.0, 0.0), (end, end)]), Series("one request", points, "dots", names)]
    return LineChart("TTFT of each request", f"{MEASURED}, ms", f"{PREDICTED}, ms", series)


def _name(outcome: Outcome, seen_s: float, expected_s: float) -> str:
    request = outcome.request
    return (
        f"{request.request_id} at {request.arrival_s:.2f} s, {request.num_prompt_tokens} prompt tokens: "
        f"{MEASURED} {format_s(seen_s)}, {PREDICTED} {format_s(expected_s)}"
    )
