"""`twinpool simulate`: what a workload would meet under each policy, from measured constants or some given by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..protocol.errors import ConfigError
from ..sizing.chrome_trace import chrome_trace
from ..sizing.experiment import Experiment, Simulated
from ..sizing.lanes import View
from ..sizing.result import Policy
from ..sizing.simulate import TEXTBOOK, Pools, Rules
from ..sizing.simulate_report import figures, html, refusals
from ..sizing.timeline import timeline_svg
from ..sizing.timeline_text import timeline_text
from ..sizing.units import counted
from .given import (
    USUAL_NUM_REQUESTS,
    Attainment,
    Burstiness,
    Duration,
    ItlP99Ms,
    Limit,
    MaxGapMs,
    OutputLengths,
    PromptLengths,
    Rate,
    Stretch,
    TpotMs,
    Trace,
    TtftMs,
    WorkloadFlags,
    costs_given,
    slo_given,
)
from .output import check_writable, print_json, save, text_console

POLICIES: tuple[Policy, ...] = get_args(Policy)
USUAL_POLICIES: tuple[Policy, ...] = ("shared", "chunked", "disaggregated")
NUM_HTML_REQUESTS = 40  # with a lane of their own
RULES = {"twinpool": Rules(), "textbook": TEXTBOOK}


@dataclass(frozen=True)
class Files:
    svg: Path | None
    html: Path | None
    chrome_trace: Path | None

    def check(self) -> None:
        for name, path in vars(self).items():
            if path is not None:
                check_writable(path, f"--{name.replace('_', '-')}")


def simulate_command(
    trace: Trace = None,
    limit: Limit = None,
    stretch: Stretch = None,
    rate: Rate = None,
    prompt: PromptLengths = None,
    output: OutputLengths = None,
    burstiness: Burstiness = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help=f"How many to generate; {USUAL_NUM_REQUESTS}, if not for --duration.")
    ] = None,
    duration: Duration = None,
    seed: Annotated[int | None, typer.Option(help="Of what is generated; 0 by default.")] = None,
    costs: Annotated[Path | None, typer.Option(help="A profile made by `twinpool calibrate`.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A constant by hand, by its key in a profile; repeatable."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(POLICIES)}; repeatable. Default: {', '.join(USUAL_POLICIES)}."),
    ] = None,
    prompt_workers: Annotated[int | None, typer.Option(min=1, help="PROMPT workers; 1, or half of --workers.")] = None,
    completion_workers: Annotated[int | None, typer.Option(min=1, help="COMPLETION workers, likewise.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Of shared and chunked; as many as the two pools have together.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a chunk; C* at the running batch without it.")
    ] = None,
    rules: Annotated[
        str,
        typer.Option(
            help="twinpool, or textbook: the first token comes from a decode step, KV is sent after the prefill, one "
            "prompt a pass."
        ),
    ] = "twinpool",
    colocated: Annotated[
        bool, typer.Option("--colocated", help="All workers share one host: the costs' contention applies.")
    ] = False,
    ttft_ms: TtftMs = None,
    tpot_ms: TpotMs = None,
    itl_p99_ms: ItlP99Ms = None,
    max_gap_ms: MaxGapMs = None,
    attainment: Attainment = 0.9,
    warmup: Annotated[float, typer.Option(min=0.0, help="Seconds whose arrivals the figures leave out.")] = 0.0,
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw every worker's passes here.")] = False,
    from_: Annotated[float, typer.Option("--from", min=0.0, help="Second at which drawings begin.")] = 0.0,
    to: Annotated[float | None, typer.Option("--to", help="Second at which they end.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the timeline as SVG.")] = None,
    html_: Annotated[
        Path | None, typer.Option("--html", help="Write a page: figures, distributions, timeline.")
    ] = None,
    chrome_trace_: Annotated[
        Path | None, typer.Option("--chrome-trace", help="Write every pass for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs; all times in seconds.")] = False,
) -> None:
    """Simulate a workload on pools of workers and compare the policies at equal numbers of workers.

    Needs no cluster and no GPU: a pass costs what the constants say, which `twinpool calibrate` measures or you set.

    \b
        twinpool simulate --costs costs.json --rate 2 --prompt 1000 --output 200 --ttft-ms 500 --tpot-ms 60
        twinpool simulate trace.csv --costs costs.json --limit 500 --html run.html
        twinpool simulate --set prefill_overhead_s=0.001 --set prefill_per_token_s=10e-6 \\
                          --set decode_base_s=0.01 --rate 20 --prompt 4096 --timeline

    Flags that end in -ms are milliseconds; --duration, --warmup, --from and --to, files and JSON are in seconds.
    shared: whole prompts go before decode steps. chunked: chunks ride with decode steps. disaggregated: two pools.
    auto: two pools, unless the costs say that a request is better off on one worker.
    """
    view, files = _view(from_, to), Files(svg, html_, chrome_trace_)
    files.check()
    _check_finite("--warmup", warmup)
    flags = WorkloadFlags(trace, limit, stretch, rate, prompt, output, burstiness, num_requests, duration, seed)
    model, source = costs_given(costs, set_ or [])
    experiment = Experiment(
        costs=model,
        source=source,
        slo=slo_given(ttft_ms, tpot_ms, itl_p99_ms, max_gap_ms, attainment),
        policies=_policies(policy or USUAL_POLICIES),
        pools=_pools(prompt_workers, completion_workers, workers),
        rules=replace(_rules(rules), colocated=colocated),
        chunk=chunk,
        warmup_s=warmup,
        requests=flags.requests(),
    )
    runs = _run(experiment, keep_bars=timeline or any(vars(files).values()))
    _write(files, experiment, runs, view)
    if as_json:
        print_json(experiment.to_json(runs))
        return
    _show(experiment, runs, text_console())
    if timeline:
        _show_timelines(runs, view, text_console())


def _policies(names: Sequence[str]) -> list[Policy]:
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise ConfigError(f"--policy is {unknown[0]!r}, must be one of {', '.join(POLICIES)}")
    return [policy for policy in POLICIES if policy in names]


def _rules(name: str) -> Rules:
    if name not in RULES:
        raise ConfigError(f"--rules is {name!r}, must be one of {', '.join(RULES)}")
    return RULES[name]


def _pools(num_prompt: int | None, num_completion: int | None, num_normal: int | None) -> Pools:
    """Fill in what was not given, so that every policy has the same number of workers where that can be."""
    if num_prompt is None and num_completion is None:
        num_prompt = max(1, (num_normal or 2) // 2)
        num_completion = max(1, (num_normal or 2) - num_prompt)
    num_prompt, num_completion = num_prompt or 1, num_completion or 1
    return Pools(num_prompt, num_completion, num_normal or num_prompt + num_completion)


def _check_finite(flag: str, seconds: float) -> None:
    if not isfinite(seconds):
        raise ConfigError(f"{flag} is {seconds:g}, must be a finite number of seconds")


def _view(from_s: float, to_s: float | None) -> View:
    _check_finite("--from", from_s)
    if to_s is None:
        return View(from_s)
    if not to_s > from_s:
        raise ConfigError(f"--to is {to_s:g}, must be after --from, {from_s:g}")
    return View(from_s, to_s)


def _run(experiment: Experiment, keep_bars: bool) -> list[Simulated]:
    runs, console = list[Simulated](), Console(stderr=True)
    for policy in experiment.policies:
        with console.status(f"simulating {policy}: {counted(len(experiment.requests), 'request')}"):
            runs.append(experiment.run(policy, keep_bars))
    return runs


def _show(experiment: Experiment, runs: Sequence[Simulated], console: Console) -> None:
    for fact in experiment.facts():
        console.print(fact, markup=False, highlight=False)
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for run in runs:
        table.add_column(run.run.policy, justify="right")
    for label, values in figures(runs):
        table.add_row(label, *values)
    console.print(table)
    for line in refusals(runs):
        console.print(line, markup=False, highlight=False)


def _show_timelines(runs: Sequence[Simulated], view: View, console: Console) -> None:
    for run in runs:
        for line in timeline_text(run.run, console.width, view):
            console.print(line, markup=False, highlight=False, no_wrap=True)
        console.print()


def _write(files: Files, experiment: Experiment, runs: Sequence[Simulated], view: View) -> None:
    plain = [run.run for run in runs]
    if files.svg is not None:
        save(files.svg, timeline_svg("Timeline", plain, view))
    if files.html is not None:
        lanes = View(view.start_s, view.end_s, max_requests=NUM_HTML_REQUESTS)
        save(files.html, html(experiment.facts(), runs, experiment.slo, lanes))
    if files.chrome_trace is not None:
        save(files.chrome_trace, chrome_trace(plain))
