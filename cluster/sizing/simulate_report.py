"""What `twinpool simulate` says about its runs: figures side by side, distributions and timelines."""

from collections.abc import Sequence

from .charts import LineChart, Series, distribution, weighted_distribution
from .experiment import Simulated
from .lanes import View
from .page import Picture, Section, Table, page
from .result import Run
from .summary import LIMIT_WORDS, PERCENTS, Distribution, Refusal, Slo, Summary
from .timeline import timeline_svg
from .units import counted

Row = tuple[str, list[str]]  # what it is, and its value for each run
STAGES = ("queue_s", "prefill_s", "transfer_s", "decode_wait_s")  # of the TTFT
RARE = ("requests refused", "preemptions")  # rows that are left out where all is 0


def figures(runs: Sequence[Simulated]) -> list[Row]:
    """Return the table: a row for each figure, a column for each run. Times are in ms, as the labels say."""
    sums = [run.summary for run in runs]
    stages = {name.replace("_", " ").removesuffix(" s"): [getattr(s, name).mean for s in sums] for name in STAGES}
    rows: list[Row] = [
        *_workers(runs),
        ("requests finished", [f"{s.num_finished:,} of {s.num_arrived:,}" for s in sums]),
        ("requests refused", [f"{s.num_refused:,}" for s in sums]),
        ("preemptions", [f"{s.num_preemptions:,}" for s in sums]),
        *_percentiles("TTFT", [s.ttft_s for s in sums]),
        ("TTFT mean, ms", [_ms(s.ttft_s.mean) for s in sums]),
        *((f"  {name}", [_ms(mean_s) for mean_s in means_s]) for name, means_s in stages.items()),
        *_percentiles("TPOT", [s.tpot_s for s in sums]),
        *_percentiles("ITL", [s.itl_s for s in sums]),
        ("largest gap, ms", [_ms(s.max_gap_s) for s in sums]),
        ("output tokens/s", [_number(s.output_tokens_per_s) for s in sums]),
        ("GPU-seconds", [f"{s.gpu_s:,.3f}" for s in sums]),
        ("  of worker-seconds", [f"{s.worker_s:,.3f}" for s in sums]),
    ]
    if sums and sums[0].slo is not None:
        rows += _kept(sums)
    return [row for row in rows if row[0] not in RARE or set(row[1]) != {"0"}]


def refusals(runs: Sequence[Simulated]) -> list[str]:
    """Say why requests were refused, and by which policies: one line a reason, with an example."""
    policies: dict[Refusal, list[str]] = {}
    for run in runs:
        for refusal in run.summary.refusals:
            policies.setdefault(refusal, []).append(run.run.policy)
    return [
        f"{counted(refusal.num, 'request')} refused by {', '.join(by)}, such as {refusal.request_id} with "
        f"{refusal.num_prompt_tokens:,} prompt and {refusal.num_output_tokens:,} output tokens: {refusal.reason}."
        for refusal, by in policies.items()
    ]


def html(facts: Sequence[str], runs: Sequence[Simulated], slo: Slo | None, view: View) -> str:
    """Return the page: figures, distributions, and a timeline with the lanes of the first requests."""
    table = Table(["", *(run.run.policy for run in runs)], [[label, *values] for label, values in figures(runs)])
    limits = slo.limits() if slo is not None else {}
    ttft = [distribution(run.run.policy, _ttfts_ms(run.run)) for run in runs]
    itl = [
        weighted_distribution(run.run.policy, {gap_s * 1e3: count for gap_s, count in run.run.gaps.items()})
        for run in runs
    ]
    timelines = [Picture(timeline_svg("Timeline", [run.run for run in runs], view))]
    return page(
        "Simulated serving",
        [
            Section("What was simulated", list(facts)),
            Section("Figures", [table, *refusals(runs)]),
            Section(
                "Distributions",
                [
                    _chart("Time to first token", "TTFT, ms", ttft, limits.get("ttft_s"), "share of requests"),
                    _chart("Time between tokens", "ITL, ms", itl, limits.get("itl_p99_s"), "share of gaps"),
                ],
            ),
            Section("Timeline", ["Point at a bar for its requests and times.", *timelines]),
        ],
    )


def _workers(runs: Sequence[Simulated]) -> list[Row]:
    """Return a row for each kind of worker, and for the size of chunks where one was given."""
    kinds = dict.fromkeys(kind for run in runs for kind in run.pools)
    rows = [
        (f"{kind} workers", [f"{run.pools[kind]:,}" if kind in run.pools else "–" for run in runs]) for kind in kinds
    ]
    if any(run.chunk is not None for run in runs):
        rows.append(("chunk, tokens", ["–" if run.chunk is None else f"{run.chunk:,}" for run in runs]))
    return rows


def _percentiles(name: str, spread: Sequence[Distribution]) -> list[Row]:
    return [(f"{name} p{percent}, ms", [_ms(getattr(each, f"p{percent}")) for each in spread]) for percent in PERCENTS]


def _chart(title: str, x_label: str, series: Sequence[Series], limit_s: float | None, y_label: str) -> Picture:
    limits = [] if limit_s is None else [(f"limit {limit_s * 1e3:g} ms", limit_s * 1e3)]
    spread = [x for one in series for x, _ in one.points if x > 0]
    wide = bool(spread) and max(spread) > 30 * min(spread)
    return Picture(LineChart(title, x_label, y_label, series, x_log=wide, x_limits=limits).svg())


def _ttfts_ms(run: Run) -> list[float]:
    return [outcome.ttft_s * 1e3 for outcome in run.outcomes if outcome.ttft_s is not None]


def _ms(value_s: float | None) -> str:
    return "–" if value_s is None else f"{value_s * 1e3:,.1f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _kept(sums: Sequence[Summary]) -> list[Row]:
    """Return how many requests kept the limits, what most of the others missed, and what that is worth."""
    return [
        ("within all limits", ["–" if s.slo_attainment is None else f"{s.slo_attainment:.1%}" for s in sums]),
        ("  SLO", [{True: "met", False: "missed", None: "–"}[s.is_slo_met] for s in sums]),
        ("  most missed", [LIMIT_WORDS.get(s.binding_limit or "", s.binding_limit or "–") for s in sums]),
        ("goodput, requests/s", [_number(s.goodput_per_s) for s in sums]),
        ("  per worker", [_number(s.goodput_per_worker_per_s) for s in sums]),
    ]
