"""`twinpool plan`: how many workers each pool needs, from measured costs, a workload and an SLO."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..config import absolute_model
from ..cost_profile import CostProfile, load_profile
from ..protocol.errors import ConfigError, TwinpoolError
from ..sizing.explore import explore
from ..sizing.plan import Effort, Plan, Progress as OnProgress, plan
from ..sizing.plan_report import report
from ..sizing.plan_spec import cluster_yaml, is_model_of, startable_model
from ..sizing.plan_words import BINDING, none_startable, short_table, slo_words, verdict
from ..sizing.result import Policy
from ..sizing.simulate import Rules
from ..sizing.trials import POLICIES, Candidate, Limits, Samples, is_startable
from ..sizing.workload import Request
from .given import (
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
    naming_flags,
    slo_given,
)
from .output import check_writable, print_json, save, text_console

KNOWN_POLICIES: tuple[Policy, ...] = get_args(Policy)
USUAL_NUM_REQUESTS = 500
FULL_TABLE_COLUMNS = 96  # a narrower terminal gets it without what binds, which is said below it for the first


def plan_command(
    trace: Trace = None,
    costs: Annotated[Path, typer.Option(help="A profile made by `twinpool calibrate`.")] = Path("costs.json"),
    limit: Limit = None,
    num_busiest: Annotated[
        int,
        typer.Option("--busiest", min=0, help="Plan for so many of them in a row, where they come fastest; 0: all."),
    ] = 2000,
    stretch: Stretch = None,
    rate: Rate = None,
    prompt: PromptLengths = None,
    output: OutputLengths = None,
    burstiness: Burstiness = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help=f"How many to generate; {USUAL_NUM_REQUESTS}, if not for --duration.")
    ] = None,
    duration: Duration = None,
    samples: Annotated[
        int, typer.Option(min=1, help="How often to generate: every candidate serves all, so no one draw decides.")
    ] = 3,
    ttft_ms: TtftMs = None,
    tpot_ms: TpotMs = None,
    itl_p99_ms: ItlP99Ms = None,
    max_gap_ms: MaxGapMs = None,
    attainment: Attainment = 0.9,
    max_workers: Annotated[int, typer.Option(min=1, help="Workers in all pools together.")] = 16,
    min_prompt: Annotated[int, typer.Option(min=1, help="Fewest PROMPT workers.")] = 1,
    min_completion: Annotated[int, typer.Option(min=1, help="Fewest COMPLETION workers.")] = 1,
    prompt_cost: Annotated[float, typer.Option(help="Of one PROMPT worker, in any unit.")] = 1.0,
    completion_cost: Annotated[float, typer.Option(help="Of one COMPLETION worker.")] = 1.0,
    normal_cost: Annotated[float, typer.Option(help="Of one NORMAL worker, which does both.")] = 1.0,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(KNOWN_POLICIES)}; repeatable. Default: {', '.join(POLICIES)}."),
    ] = None,
    colocated: Annotated[
        bool, typer.Option("--colocated", help="All workers share one host: the costs' contention applies.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="How many candidates to rank.")] = 5,
    draws: Annotated[int, typer.Option(min=0, help="Draws of the constants from their spread, for stability.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the workload and of the draws.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(help="As `twinpool up` takes it; refuses costs of any other. Default: what was calibrated."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with pictures; simulates more for it.")] = None,
    spec: Annotated[Path | None, typer.Option("-o", "--spec", help="Write the cluster.yaml for `twinpool up`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")] = False,
) -> None:
    """Say how many workers each pool needs, and whether two pools are worth it.

    Takes measured costs, a workload (a trace, or a rate and lengths) and an SLO, and simulates candidates on the same
    requests. Exit code 1, with the reason, when nothing within the limits meets the SLO, or when -o has no pools to
    write that can be started.

    \b
        twinpool plan trace.csv --costs costs.json --ttft-ms 500 --tpot-ms 60
        twinpool plan --rate 4 --prompt lognormal:1000,0.8 --output 200 --ttft-ms 500 --max-gap-ms 100
        twinpool plan trace.csv --stretch 0.5 --ttft-ms 500 --tpot-ms 60 --html plan.html -o cluster.yaml

    How to read it: binding is what one worker less would run out of; headroom is how many times the rate the pools
    carry before they miss the SLO; stable in k of n draws says how often the answer survives the constants' spread.
    """
    for file, flag in ((html, "--html"), (spec, "-o")):
        if file is not None:
            check_writable(file, flag)
    policies = _policies(policy or POLICIES)
    if spec is not None and not any(map(is_startable, policies)):
        raise ConfigError(
            "-o writes two pools, all that Twinpool can start yet, and --policy leaves them out",
            hint="--policy disaggregated",
        )
    profile = _load(costs, model)
    model = _model_to_start(profile, model, is_needed=spec is not None)
    flags = WorkloadFlags(
        trace, limit, stretch, rate, prompt, output, burstiness, num_requests, duration, None if trace else seed
    )
    drawn = _samples(flags, num_busiest, samples)
    slo = slo_given(ttft_ms, tpot_ms, itl_p99_ms, max_gap_ms, attainment)
    if slo is None:
        raise ConfigError("there is no limit to plan for", hint="such as --ttft-ms 500 --tpot-ms 60")
    with naming_flags():
        limits = Limits(
            max_workers=max_workers,
            min_prompt=min_prompt,
            min_completion=min_completion,
            prompt_cost=prompt_cost,
            completion_cost=completion_cost,
            normal_cost=normal_cost,
            policies=policies,
            rules=Rules(colocated=colocated),
        )
    requests, *more = drawn
    with _progress(Console(stderr=True)) as on_progress:
        effort = Effort(num_ranked=top, num_draws=draws, seed=seed)
        found = plan(
            requests,
            profile,
            slo,
            limits,
            more_samples=more,
            offered_per_s=rate,
            effort=effort,
            on_progress=on_progress,
        )
        text = cluster_yaml(found, profile, model)
        if html is not None:
            extra = explore(found, drawn, profile.model(), on_progress)
            save(html, report(found, requests, profile, extra, text))
    if spec is not None and text is not None:
        save(spec, text)
    if as_json:
        print_json({**found.to_json(), "cluster_yaml": text})
    else:
        _show(found, _words(flags, drawn), text, text_console())
    if not found.is_feasible:
        raise TwinpoolError(f"infeasible: {found.reason}", hint=_hint(found))
    if spec is not None and text is None:
        raise TwinpoolError(f"{spec} was not written: {none_startable(found)}", hint=_hint(found))


def _samples(flags: WorkloadFlags, num_busiest: int, num_samples: int) -> Samples:
    """Return a trace's busiest stretch, or several draws of a distribution from consecutive seeds."""
    if flags.trace is not None:
        return [busiest(replace(flags, seed=None).requests(), num_busiest)]
    if flags.num_requests is None and flags.duration_s is None:
        flags = replace(flags, num_requests=USUAL_NUM_REQUESTS)
    return [replace(flags, seed=(flags.seed or 0) + i).requests() for i in range(num_samples)]


def _words(flags: WorkloadFlags, samples: Samples) -> str:
    num = f"{len(samples[0]):,} requests"
    return f"{num} of {flags.trace.name}" if flags.trace is not None else f"{len(samples)} samples of {num}"


def busiest(requests: list[Request], num: int) -> list[Request]:
    """Return the `num` consecutive requests that arrive within the shortest time, the first at 0; 0: all."""
    if not 0 < num < len(requests):
        return requests
    starts = range(len(requests) - num + 1)
    start = min(starts, key=lambda i: requests[i + num - 1].arrival_s - requests[i].arrival_s)
    first_s = requests[start].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in requests[start : start + num]]


def _load(costs: Path, model: str | None) -> CostProfile:
    profile = load_profile(costs)
    if model is not None and not is_model_of(profile, model):
        measured = startable_model(profile) or profile.fingerprint.model
        raise ConfigError(
            f"{costs} holds the costs of {measured}, not of {model}", hint=f"calibrate a cluster of {model}"
        )
    return profile


def _model_to_start(profile: CostProfile, model: str | None, is_needed: bool) -> str | None:
    """Return what `up` is to start; without a flag what the profile says. Raises ConfigError where nobody says it."""
    if model is not None and model != profile.fingerprint.model:
        return absolute_model(model)
    known = startable_model(profile)
    if known is None and is_needed:
        raise ConfigError(
            f"the costs are of {profile.fingerprint.model}, but do not say how that is started",
            hint="--model FOLDER, or a hub id, as you give it to `twinpool up`",
        )
    return known


def _policies(names: Sequence[str]) -> tuple[Policy, ...]:
    unknown = [name for name in names if name not in KNOWN_POLICIES]
    if unknown:
        raise ConfigError(f"--policy is {unknown[0]!r}, must be one of {', '.join(KNOWN_POLICIES)}")
    return tuple(policy for policy in KNOWN_POLICIES if policy in names)


@contextmanager
def _progress(console: Console) -> Generator[OnProgress]:
    columns = (
        TextColumn("simulated {task.completed}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def advance(candidate: Candidate) -> None:
            bar.update(task, advance=1, description=candidate.label)

        yield advance


def _show(found: Plan, words: str, spec: str | None, console: Console) -> None:
    def say(*sentences: object, style: str | None = None) -> None:
        for sentence in sentences:  # elsewhere than on a terminal each stays one line, for grep
            console.print(str(sentence), style=style, highlight=False, markup=False, soft_wrap=not console.is_terminal)

    say(f"{words}; {slo_words(found)}", style="bold")
    say(*found.explanation, style="dim")
    if found.recommended is None:
        return
    console.print(_ranking(found, console.width))
    say(*verdict(found))
    if spec is not None:
        console.print(f"\n{spec}", highlight=False, markup=False, soft_wrap=True, end="")


def _ranking(found: Plan, width: int) -> Table:
    content = short_table(found)
    names = [name for name in content.header if name != BINDING or width >= FULL_TABLE_COLUMNS]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0), caption_justify="left", caption_style="dim")
    table.caption = "P PROMPT, C COMPLETION, N NORMAL workers; attainment ± two standard errors, in %"
    for name in names:
        table.add_column(name, justify="left" if name in ("policy", "workers", BINDING) else "right", no_wrap=True)
    for row in content.rows:
        table.add_row(*map(str, row[: len(names)]))
    return table


def _hint(found: Plan) -> str | None:
    return "raise --max-workers, or the limits" if found.trials else None
