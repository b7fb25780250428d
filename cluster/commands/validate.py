"""`twinpool validate`: sends a workload to the running cluster, simulates the same, shows how far apart they are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..cost_profile import CostProfile, load_profile
from ..protocol.errors import ConfigError, LaunchError
from ..sizing.bounds import demand_of
from ..sizing.conditions import unlike
from ..sizing.distributions import LENGTHS_HELP
from ..sizing.live_prober import LiveProber
from ..sizing.page import Table as PageTable
from ..sizing.probing import ProbedWorker
from ..sizing.record import Target, record_runs
from ..sizing.recording import Recording, load_recording
from ..sizing.simulate import Rules
from ..sizing.units import counted
from ..sizing.validate import Validation, is_colocated, is_gated, pools_of, rate_of_load, validate
from ..sizing.validate_report import errors_table, facts_of, per_request_table, report, stages_table
from ..sizing.workload import Request
from .find import find_cluster
from .given import (
    FLAGS,
    Attainment,
    Burstiness,
    ItlP99Ms,
    Limit,
    MaxGapMs,
    Stretch,
    TpotMs,
    TtftMs,
    WorkloadFlags,
    slo_given,
)
from .output import check_writable, print_json, save, text_console, warn

USUAL_LOAD, USUAL_DURATION_S, USUAL_REPEATS = 0.5, 60.0, 3
USUAL_PROMPT, USUAL_OUTPUT = "64-512", "16-64"
MAX_LOAD = 2.0  # beyond it a queue only grows
MIN_REQUESTS = 20
NUM_SAMPLED = 1000  # generated requests whose mean cost makes a rate of a load


@dataclass(frozen=True)
class Live:
    """What to send to which cluster. `load` is the share of its capacity, for flags without a rate."""

    name: str | None
    flags: WorkloadFlags
    load: float
    num_runs: int


def validate_command(
    trace: Annotated[
        Path | None, typer.Argument(help="Arrivals and lengths to send, in any format that simulate reads.")
    ] = None,
    costs: Annotated[Path, typer.Option(help="The profile of this cluster, by `twinpool calibrate`.")] = Path(
        "costs.json"
    ),
    load: Annotated[
        float | None,
        typer.Option(help=f"Share of the cluster's capacity to generate, by the costs; {USUAL_LOAD} by default."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second to generate, instead of --load.")] = None,
    prompt: Annotated[str | None, typer.Option(help=f"{LENGTHS_HELP} Default: {USUAL_PROMPT}.")] = None,
    output: Annotated[str | None, typer.Option(help=f"Likewise, of the answers. Default: {USUAL_OUTPUT}.")] = None,
    burstiness: Burstiness = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="How many to generate, instead of --duration.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help=f"Seconds of arrivals to generate; {USUAL_DURATION_S:g} by default.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of what is generated, and of the prompts; 0 by default.")] = None,
    limit: Limit = None,
    stretch: Stretch = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"How often to send the same arrivals; their own spread needs two. Default: {USUAL_REPEATS}."
        ),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Keep what the client saw, as JSON lines.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Compare what --record kept, once more; needs no running cluster.")
    ] = None,
    ttft_ms: TtftMs = None,
    tpot_ms: TpotMs = None,
    itl_p99_ms: ItlP99Ms = None,
    max_gap_ms: MaxGapMs = None,
    attainment: Attainment = 0.9,
    html: Annotated[Path | None, typer.Option(help="Write a page with predicted and measured distributions.")] = None,
    name: Annotated[str | None, typer.Option(help="Which cluster; not needed while only one runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs; all times in seconds.")] = False,
) -> None:
    """Check the simulator against the running cluster: the same arrivals in both, and the errors between them.

    Sends requests at their times, whether or not earlier ones were answered, several times over. Nothing else should
    use the cluster or its hosts meanwhile.

    \b
        twinpool calibrate
        twinpool validate --load 0.5 --html validation.html
        twinpool validate --rate 2 --prompt 64-512 --output 16-64 --record run.jsonl
        twinpool validate --replay run.jsonl --costs other.json

    Errors are signed: +5 % means predicted too long. Exit code 1, with the reasons, when both sides did not run the
    same thing, or when at 30 to 70 % load mean or median of TTFT or ITL is more than 10 % off, or their p99 more than
    20 %. An error is not held against the prediction where the live runs differ more among themselves: noisy.
    """
    slo = slo_given(ttft_ms, tpot_ms, itl_p99_ms, max_gap_ms, attainment)
    flags = WorkloadFlags(trace, limit, stretch, rate, prompt, output, burstiness, num_requests, duration, seed)
    _check_load(flags, load)
    if replay is not None:
        _check_unused({**vars(flags), "load": load, "repeats": repeats, "record": record, "name": name})
    for flag, file in (("--record", record), ("--html", html)):
        if file is not None:
            check_writable(file, flag)
    profile = load_profile(costs)
    if replay is not None:
        recording = load_recording(replay)
        warn_of_few(len(recording.requests))
    else:
        live = Live(name, flags, USUAL_LOAD if load is None else load, repeats or USUAL_REPEATS)
        recording = _record(live, profile, record)
    found = validate(recording, profile, slo)
    facts = facts_of(found, recording)
    if html is not None:
        save(html, report(found, "Predicted against measured", facts))
    if as_json:
        print_json(_json(found, recording))
    else:
        _show(found, facts, text_console())
    if found.reasons:
        raise typer.Exit(1)


def _record(live: Live, profile: CostProfile, file: Path | None) -> Recording:
    """Send everything. What would fail the validation anyway is told before minutes are spent on it."""
    cluster = find_cluster(live.name).state
    with LiveProber(cluster.admin_socket, cluster.endpoint, cluster.model_name) as prober:
        workers = prober.workers()
        problems = unlike(workers, profile)
        if problems:
            raise LaunchError(
                "the cost profile is not this cluster's:\n  " + "\n  ".join(problems),
                hint="`twinpool calibrate` measures this one",
            )
        requests = _requests(live, profile, workers)
        warn_of_few(len(requests))
        target = Target(cluster.endpoint, cluster.model_name, live.flags.seed or 0)
        with _progress() as progress:
            task = progress.add_task("requests answered", total=len(requests) * live.num_runs)
            recording = record_runs(prober, target, requests, live.num_runs, lambda _: progress.advance(task))
    if file is not None:
        recording.save(file)
    return recording


def _requests(live: Live, profile: CostProfile, workers: Sequence[ProbedWorker]) -> Sequence[Request]:
    """Return the workload; a load becomes the rate that it means for requests like these."""
    flags = live.flags
    if flags.trace is not None:
        return flags.requests()
    flags = _with_defaults(flags)
    if flags.rate_per_s is None:
        sample = replace(flags, rate_per_s=1.0, num_requests=NUM_SAMPLED, duration_s=None).requests()
        costs, pools, rules = profile.expected(), pools_of(workers), Rules(colocated=is_colocated(workers))
        flags = replace(flags, rate_per_s=rate_of_load(live.load, demand_of(sample), costs, pools, rules))
    return flags.requests()


def warn_of_few(num_requests: int) -> None:
    """Warn when percentiles, and with them the gates, rest on hardly any requests."""
    if num_requests < MIN_REQUESTS:
        warn(
            f"{counted(num_requests, 'request')} a run; to judge a prediction takes {MIN_REQUESTS} or more\n"
            "hint: raise --duration or --num-requests, or give a --rate; by upper bounds a --load is less than it says"
        )


def _with_defaults(flags: WorkloadFlags) -> WorkloadFlags:
    """Return flags for a workload that suits a small model on a few cores."""
    duration_s = USUAL_DURATION_S if flags.duration_s is None and flags.num_requests is None else flags.duration_s
    lengths = {"prompt": flags.prompt or USUAL_PROMPT, "output": flags.output or USUAL_OUTPUT}
    return replace(flags, **lengths, duration_s=duration_s)


def _check_load(flags: WorkloadFlags, load: float | None) -> None:
    if load is not None and (flags.trace is not None or flags.rate_per_s is not None):
        raise ConfigError("--load cannot be given beside a trace or --rate", hint="--stretch changes a trace's rate")
    if load is not None and not 0 < load <= MAX_LOAD:
        raise ConfigError(f"--load is {load:g}, must be a share of the capacity: above 0, at most {MAX_LOAD:g}")


def _check_unused(flags: dict[str, Any]) -> None:
    given = [
        FLAGS.get(key, f"--{key}" if key != "trace" else "trace") for key, value in flags.items() if value is not None
    ]
    if given:
        raise ConfigError(f"--replay compares what was recorded; it takes no {', '.join(given)}")


def _progress() -> Progress:
    """Return the bar, on standard error; nothing where that is no terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _show(found: Validation, facts: Sequence[str], console: Console) -> None:
    for fact in facts:
        console.print(fact, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(errors_table(found.cells)))
    console.print(_table(per_request_table(found)))
    console.print(_table(stages_table(found)))
    for reason in found.reasons:
        console.print(f"failed: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)


def _table(shown: PageTable) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for number, label in enumerate(shown.header):
        table.add_column(label, justify="right" if number else "left")
    for row in shown.rows:
        table.add_row(*map(str, row))
    return table


def _json(found: Validation, recording: Recording) -> dict[str, Any]:
    return {
        "load": found.load,
        "is_gated": is_gated(found.load),
        "num_requests": len(recording.requests),
        "num_runs": recording.num_runs,
        "client_cpu_shares": recording.header.client_cpu_shares,
        "cells": [{**asdict(cell), "error": cell.error, "verdict": cell.verdict} for cell in found.cells],
        "per_request": [asdict(each) for each in found.per_request],
        "live": [summary.to_json() for summary in found.live_summaries],
        "predicted": [summary.to_json() for summary in found.predicted_summaries],
        "reasons": found.reasons,
    }
