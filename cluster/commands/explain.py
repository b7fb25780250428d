"""`twinpool explain`: what a model can cost on a device, by closed formulas, as tables."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..cost_profile import load_profile
from ..sizing.devices import Figures, find_device
from ..sizing.explanation import Question, explain
from ..sizing.formulas import MEMORY_SHARE
from ..sizing.model_shape import Bits, load_shape
from ..sizing.units import counted, format_chunk, format_s
from .output import print_json, text_console

Row = dict[str, Any]


def explain_command(
    model: Annotated[str, typer.Argument(help="smollm2, a local folder or config.json, or a hub id cached here.")],
    device: Annotated[
        str | None,
        typer.Option(
            help="h100, h200, b200, a100-80g, a100-40g, l40s, l4, rtx-pro-6000, rtx-4090, rtx-3080ti-laptop, mi300x."
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, and of history in each sequence.")] = 2000,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences in a decode step; repeat for more.")] = None,
    costs: Annotated[Path | None, typer.Option(help="Profile from `twinpool calibrate`: adds measured times.")] = None,
    flops: Annotated[float | None, typer.Option(help="The device's dense BF16 FLOP/s, such as 989e12.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Its memory's bytes/s, such as 3.35e12.")] = None,
    memory: Annotated[float | None, typer.Option(help="Its memory in bytes, such as 80e9.")] = None,
    compute_efficiency: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the FLOP/s to expect.")] = 0.6,
    bandwidth_efficiency: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the bytes/s, too.")] = 0.8,
    memory_share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Part for weights and KV.")] = MEMORY_SHARE,
    weight_bits: Annotated[
        float | None, typer.Option(min=1.0, max=64.0, help="Bits of a weight, if not those of the config's dtype.")
    ] = None,
    kv_bits: Annotated[
        float | None, typer.Option(min=1.0, max=64.0, help="Bits of a value in the KV cache, likewise.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")] = False,
) -> None:
    """Say what a model can cost on a device: prefill, decode, memory, transfer, and the chunk C*.

    Needs the model's config.json only: no weights, no GPU, no network.

    \b
        twinpool explain smollm2 --device l4
        twinpool explain ./Llama-3.1-8B --device h100 --prompt 8000 --batch 1 --batch 64
        twinpool explain config.json --flops 989e12 --bandwidth 3.35e12 --memory 80e9
        twinpool explain smollm2 --device l4 --costs costs.json

    How to read it: prefill multiplies many tokens by each weight it reads and is bound by FLOP/s; decode multiplies
    few and is bound by bytes/s; the ridge says where one turns into the other. Sequences that decode together share
    the read of the weights but not that of their KV, and memory ends the batch.

    C* is the chunk of a prompt that takes as long as one decode step: smaller chunks shorten no gap between tokens.
    Where it is tiny or negative, chunking has no room and two pools are better. Formulas know no overhead of launching
    a pass, which decides this; only a profile (--costs) has measured it.
    """
    shape = load_shape(model, Bits(weight_bits, kv_bits))
    found = find_device(device, Figures(flops, bandwidth, memory))
    question = Question(prompt, tuple(batch or ()), compute_efficiency, bandwidth_efficiency, memory_share)
    answer = explain(shape, found, question, load_profile(costs) if costs else None)
    if as_json:
        print_json(answer)
    else:
        show_explanation(answer, text_console())


def show_explanation(answer: Row, console: Console) -> None:
    """Print the answer of `explain` as tables."""
    _show_head(answer, console)
    prompt, has_costs = answer["question"]["prompt_tokens"], "costs" in answer
    console.print(_decode_table(answer, has_costs))
    console.print(_prefill_table(answer, has_costs))
    console.print(_chunk_table(answer, has_costs))
    table = _table(
        f"Transfer of the KV of {counted(prompt, 'token')}", "link", "GB/s", "time", "of the expected prefill"
    )
    for row in answer["transfer"]:
        speed = f"{row['bytes_per_s'] / 1e9:.4g}" if row["bytes_per_s"] else "-"
        table.add_row(row["link"], speed, format_s(row["transfer_s"]), f"{row['share_of_prefill']:,.1%}")
    console.print(table)
    _show_foot(answer, console)


def _show_head(answer: Row, console: Console) -> None:
    model, device = answer["model"], answer["device"]
    active = f", {_billions(model['num_active_params'])} of them active" if model["num_experts"] else ""
    lines = [
        f"[bold]{escape(model['name'])}[/bold]: {_billions(model['num_params'])} parameters{active}, "
        f"{model['weights_bytes'] / 1e9:.4g} GB; {counted(model['num_layers'], 'layer')}, "
        f"{counted(model['num_heads'], 'head')}, {counted(model['num_kv_heads'], 'KV head')} of {model['head_dim']}: "
        f"{model['kv_bytes_per_token']:,.0f} bytes ({model['kv_bytes_per_token'] / 1024:.4g} KiB) of KV a token",
        f"[bold]{escape(device['product'])}[/bold]: {device['flops_per_s'] / 1e12:.4g} TFLOP/s (BF16), "
        f"{device['bytes_per_s'] / 1e12:.4g} TB/s, {device['memory_bytes'] / 1e9:.4g} GB; "
        f"ridge {device['ridge_flops_per_byte']:.1f} FLOP/byte: "
        f"passes below {device['knee_tokens']:,.0f} tokens are bound by memory",
        *(f"[yellow]note:[/yellow] {escape(remark)}" for remark in model["remarks"]),
    ]
    for line in lines:
        console.print(line, highlight=False)


def _decode_table(answer: Row, has_costs: bool) -> Table:
    history = answer["question"]["prompt_tokens"]
    columns = ["batch", "FLOP/byte", "", "tok/s each", "in all", "C*", *(["overhead", "reading"] if has_costs else [])]
    table = _table(f"Decode with {counted(history, 'token')} of history each", *columns)
    for row in answer["decode"]:
        batch = row["num_sequences"]
        fits = batch <= answer["max_sequences"]
        batch_cells = [f"{batch:,}", "" if fits else "[red]no room[/red]", ""]
        intensity_cells = [f"{row['intensity_flops_per_byte']:.1f}", "", ""]
        kinds = ("ideal", "expected", "measured") if has_costs else ("ideal", "expected")
        for batch_cell, intensity_cell, kind in zip(batch_cells, intensity_cells, kinds, strict=False):
            rate = batch / row[f"{kind}_step_s"]
            cells = [f"{rate / batch:,.1f}", f"{rate:,.0f}", format_chunk(row[f"{kind}_chunk_tokens"]).split()[0]]
            if kind == "measured":
                cells += [f"{row['measured_overhead_share']:.0%}", row["measured_reading"]]
            table.add_row(batch_cell, intensity_cell, kind, *cells)
    return table


def _prefill_table(answer: Row, has_costs: bool) -> Table:
    table = _table("Prefill in one pass", "tokens", "FLOP/byte", "attention adds", "ideal", "expected")
    if has_costs:
        table.add_column("measured", justify="right")
    for row in answer["prefill"]:
        cells = [f"{row['num_tokens']:,}", f"{row['intensity_flops_per_byte']:,.0f}", f"{row['attention_share']:.1%}"]
        cells += [format_s(row[key]) for key in ("ideal_s", "expected_s", "measured_s") if key in row]
        table.add_row(*cells)
    return table


def _chunk_table(answer: Row, has_costs: bool) -> Table:
    prompt, batch = answer["question"]["prompt_tokens"], answer["decode"][0]["num_sequences"]
    title = f"A prompt of {counted(prompt, 'token')} in chunks, a decode step of {batch:,} beside each"
    headings = {
        "expected_chunk_s": "expected\none alone",
        "expected_prefill_s": "expected\nall alone",
        "expected_gap_max_s": "gap if it\nis free",
        "expected_gap_sum_s": "gap if\nthey add",
    }
    if has_costs:
        headings |= {"measured_gap_s": "measured\ngap", "measured_prefill_s": "measured\nall alone"}
    table = _table(title, "chunk", "passes", *headings.values())
    for row in answer["chunks"]:
        table.add_row(f"{row['chunk_tokens']:,}", str(row["num_passes"]), *(format_s(row[key]) for key in headings))
    return table


def _show_foot(answer: Row, console: Console) -> None:
    question, room = answer["question"], answer["max_sequences"]
    lines = [
        f"memory: {counted(room, 'sequence')} of {counted(question['prompt_tokens'], 'token')} fit beside the weights"
        f" into {question['memory_share']:.0%} of it",
        "ideal: the device's peaks, ceilings that nothing exceeds (transfers too). expected: "
        f"{question['compute_efficiency']:.0%} of its FLOP/s, {question['bandwidth_efficiency']:.0%} of its bytes/s.",
    ]
    if not room:
        lines.insert(1, "  for several devices together give their sums: --flops --bandwidth --memory")
    if "costs" in answer:
        fingerprint, bounds = answer["costs"]["fingerprint"], answer["costs"]["bounds"]
        lines.append(f"measured: {fingerprint['model']} in {fingerprint['dtype']} on {fingerprint['host']}")
        if bounds:
            lines.append(f"  upper bounds stand for what was not measured: {', '.join(bounds)}")
    else:
        lines.append("C* here knows no overhead of a pass; `twinpool calibrate` measures it, --costs FILE shows it.")
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _billions(number: float) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.4g} million"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("link", "") else "right")
    return table
