"""`twinpool status` and `twinpool logs`: what runs, what happened, what it wrote."""

import os
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..launch.child import tail_lines
from ..launch.run_state import RunFolder
from ..protocol.errors import LaunchError
from .find import find_cluster, pick_name

STATE_COLORS = {"ready": "green", "failed": "red", "starting": "cyan"}
COLUMNS = ("process", "role", "node", "state", "pid", "restarts", "last exit", "sequences", "blocks free/all")
NUM_SHOWN_INCIDENTS = 8
FOLLOW_TICK_S = 0.1


def show_status(status: dict[str, Any], console: Console) -> None:
    """Print one cluster's status as a table, with what happened lately below it."""
    state = status["state"]
    console.print(
        f"[bold]{status['name']}[/bold] [{_color(state)}]{state}[/{_color(state)}] for {ago(status['uptime_s'])}"
        f"   {status['endpoint']}/v1   model {escape(status['model_name'])}   Ray {status['ray_address']}",
        highlight=False,
    )
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for row in status["processes"]:
        table.add_row(*_cells(row))
    console.print(table)
    if status["router"]:
        console.print(f"requests: {status['router'].get('queued')} queued, {status['router'].get('running')} running")
    if status["incidents"]:
        console.print("lately:")
    for incident in status["incidents"][:NUM_SHOWN_INCIDENTS]:
        line = f"  {ago(incident['at_s_ago']):>8} ago  {incident['worker']:<14} {incident['what']}"
        console.print(line, markup=False, highlight=False)


def ago(seconds: float) -> str:
    """Say a duration as one number: `42 s`, `7 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_logs(process: str, name: str | None, num_lines: int, follow: bool, console: Console) -> None:
    """Print the end of a process's log; with `follow`, what comes after it until Ctrl-C or the cluster's end."""
    folder = RunFolder(pick_name(name) or "twinpool")
    path = folder.logs / f"{process}.log"
    if not path.is_file() or path.parent != folder.logs:
        known = sorted(file.stem for file in folder.logs.glob("*.log")) if folder.logs.is_dir() else []
        raise LaunchError(
            f"there is no log of {process!r} in the cluster {folder.name}",
            hint=f"there are logs of {', '.join(known)}" if known else "`twinpool up` starts a cluster",
        )
    for line in tail_lines(path, num_lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if follow:
        find_cluster(folder.name)
        _follow(path, folder, console)


def _follow(path: Path, folder: RunFolder, console: Console) -> None:
    with path.open(errors="replace") as log:
        log.seek(0, os.SEEK_END)
        while True:
            text = log.read()
            if text:
                console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
            elif not folder.is_running():
                return
            else:
                time.sleep(FOLLOW_TICK_S)


def _cells(row: dict[str, Any]) -> list[str]:
    load = row["load"]
    last = row["last_exit"]
    exit_words = f"{last['what']}, {ago(last['at_s_ago'])} ago" if last else "-"
    state = f"[{_color(row['state'])}]{row['state']}[/{_color(row['state'])}]"
    if row["reason"]:
        state += f": {escape(row['reason'])}"
    blocks = f"{load['num_free_blocks']}/{load['num_blocks']}" if "num_blocks" in load else "-"
    counts = [str(row["pid"] or "-"), str(row["num_restarts"]), exit_words, str(load.get("num_sequences", "-")), blocks]
    return [row["name"], row["role"], row["node"] or "-", state, *counts]


def _color(state: str) -> str:
    return STATE_COLORS.get(state, "yellow")
