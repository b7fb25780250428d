"""`twinpool calibrate`: measures the cost model's constants on the running cluster, shows them and writes them down."""

from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..config import load_spec
from ..cost_profile import Constant, CostProfile
from ..costs import CostModel
from ..sizing.calibrate import (
    DEFAULT_BUDGET_S,
    DEFAULT_MAX_DISTURBANCE,
    QUICK_BUDGET_S,
    Options,
    calibrate,
)
from ..sizing.live_prober import LiveProber
from ..sizing.plan_spec import started_with
from ..sizing.units import counted, format_chunk, format_s
from .find import find_cluster
from .output import check_writable, print_json, text_console

CACHED_EACH = 512  # of the sequences for which C* is shown


def calibrate_command(
    name: Annotated[str | None, typer.Option(help="Which cluster; not needed while only one runs.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the profile goes.")] = Path("costs.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Half the shapes in half the time; wider spreads.")] = False,
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help=f"Seconds it may take, about; {DEFAULT_BUDGET_S:g}, or {QUICK_BUDGET_S:g} with --quick. "
            "A few repeats are made in any case; where they do not fit, the most expensive shapes are left out.",
        ),
    ] = None,
    max_disturbance: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="How far the machine may move meanwhile, relative: the medians of a control pass between start, "
            "middle and end, and the quartiles of the repeats. Beyond, nothing is written.",
        ),
    ] = DEFAULT_MAX_DISTURBANCE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")] = False,
) -> None:
    """Measure what passes, steps and transfers cost on the running cluster, and write it to costs.json.

    The workers time whole passes of their own, so nothing else should use the cluster or its hosts meanwhile.

    \b
        twinpool up --detach
        twinpool calibrate
        twinpool calibrate --quick -o quick.json

    A constant that the noise hides gets no number but an upper bound, and everything that plans uses the bound. When
    the machine was disturbed, the whole profile is refused.
    """
    check_writable(output, "--output")
    cluster = find_cluster(name)
    spec = load_spec(cluster.folder.spec)
    budget_s = time_budget or (QUICK_BUDGET_S if quick else DEFAULT_BUDGET_S)
    options = Options(budget_s, quick, max_disturbance, spec.prompt.engine.num_threads)
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    state = cluster.state
    with LiveProber(state.admin_socket, state.endpoint, state.model_name) as prober, _progress() as progress:
        task = progress.add_task("", total=1.0)
        profile = calibrate(
            prober, options, measured_at, lambda what, share: progress.update(task, description=what, completed=share)
        )
    profile = profile.model_copy(update={"started_with": started_with(spec)})
    profile.save(output)
    if as_json:
        print_json({"file": str(output), "profile": profile.model_dump(mode="json"), "chunking": readings(profile)})
    else:
        show_profile(profile, text_console())
        text_console().print(f"written to {output}", highlight=False, markup=False)


def readings(profile: CostProfile) -> list[dict[str, Any]]:
    """Return C* and how to read it for one sequence, for some, and for as many as a COMPLETION worker holds."""
    model, full = profile.model(), profile.completion
    most = max(1, min(full.max_num_seqs, full.num_blocks * full.block_size_tokens // (CACHED_EACH + 1)))
    return [_reading(model, batch) for batch in sorted({1, max(1, most // 4), most})]


def show_profile(profile: CostProfile, console: Console) -> None:
    """Print the constants, how to chunk, and what was refused and why."""
    whose, constants = profile.fingerprint, profile.constants.items()
    console.print(
        f"{whose.model} in {whose.dtype} on {whose.host}, {counted(whose.num_threads, 'thread')}, engine "
        f"{whose.engine}",
        markup=False,
        highlight=False,
    )
    table = Table("constant", "median", "± spread", "n", "status", box=box.SIMPLE_HEAD, pad_edge=False)
    for key, constant in constants:
        table.add_row(*_cells(key, constant))
    console.print(table)
    if profile.decode_knee_sequences:
        console.print(
            f"decode_large holds from {counted(profile.decode_knee_sequences, 'sequence')} on", highlight=False
        )
    lines = [_fuse_line(profile), *(_chunk_line(reading) for reading in readings(profile)), *_capacity_lines(profile)]
    lines += [f"{key}: {constant.status}, {constant.reason}" for key, constant in constants if constant.reason]
    for line in [*lines, *profile.notes]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _reading(model: CostModel, batch: int) -> dict[str, Any]:
    shape = (batch, batch * CACHED_EACH)
    tokens, stretch = model.chunk_size(*shape), model.chunking_stretch(*shape)
    return {
        "num_sequences": batch,
        "num_cached_tokens": shape[1],
        "decode_step_s": model.decode_s(*shape),
        "overhead_share": model.overhead_share(*shape),
        "chunk_tokens": tokens if isfinite(tokens) else None,
        "prefill_stretch": stretch if isfinite(stretch) else None,
        "reading": model.chunk_or_split(*shape),
    }


def _chunk_line(reading: dict[str, Any]) -> str:
    stretch, tokens, batch = reading["prefill_stretch"], reading["chunk_tokens"], reading["num_sequences"]
    longer = f"chunks of it make a prefill {stretch:.2f}x as long" if stretch else "no chunk is that short"
    return (
        f"C* = {format_chunk(inf if tokens is None else tokens)} beside {counted(batch, 'sequence')} "
        f"with {CACHED_EACH} tokens each (step {format_s(reading['decode_step_s'])}, overhead "
        f"{reading['overhead_share']:.0%} of it): {longer} → {reading['reading']}"
    )


def _fuse_line(profile: CostProfile) -> str:
    errors = ", ".join(f"{rule} {error:.1%}" for rule, error in profile.fuse.relative_errors.items())
    return f"fused passes follow {profile.fuse.rule} ({f'off by: {errors}' if errors else 'assumed, none was timed'})"


def _capacity_lines(profile: CostProfile) -> list[str]:
    return [
        f"a {role} worker holds {counted(capacity.num_blocks * capacity.block_size_tokens, 'token')} of KV in "
        f"{counted(capacity.num_blocks, 'block')}, {counted(capacity.max_num_seqs, 'sequence')}, and "
        f"{counted(capacity.max_num_batched_tokens, 'token')} a pass"
        for role, capacity in (("PROMPT", profile.prompt), ("COMPLETION", profile.completion))
    ]


def _cells(key: str, constant: Constant) -> list[str]:
    value, spread = (
        f"{number:.2f}" if key.endswith("_ratio") else format_s(number) for number in (constant.value, constant.spread)
    )
    if constant.status == "measured":
        return [key, value, spread, f"{constant.n}", constant.status]
    return [key, f"≤ {value}", "", f"{constant.n}", constant.status]


def _progress() -> Progress:
    """Return the bar, on standard error; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
