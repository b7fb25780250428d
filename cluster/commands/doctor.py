"""`twinpool doctor`: looks at a running cluster a few times and says what is wrong with it."""

import time
from dataclasses import asdict
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from ..config import load_spec
from ..doctor import CHECKS, Finding, Look, examine
from ..launch.router_view import RouterView
from ..protocol.errors import LaunchError
from ..status_documents import LauncherDocument, RouterDocument
from .find import RunningCluster, find_cluster
from .output import print_json, text_console

LOOK_S = 0.5
ROUTER_TIMEOUT_S = 1.0
COLORS = {"wrong": "red", "suspicious": "yellow"}
Named = list[tuple[str, Finding]]  # findings with the names of their checks


def doctor_command(
    name: Annotated[str | None, typer.Option(help="Which cluster; not needed while only one runs.")] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=600.0, help="How long to look.")] = 2.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")
    ] = False,
) -> None:
    """Check a running cluster's invariants and say what is wrong, the worst first, with what to do.

    It only asks: the launcher and the router say what they know, several times within --seconds, and nothing is
    changed. A finding is `wrong` when it must not be, `suspicious` when there can be a good reason.

    \b
        twinpool doctor                 everything that can be seen within 2 s
        twinpool doctor --seconds 10    look for longer: hangs and leaks show more surely
        twinpool doctor --json          for programs

    Exit code 1 when something is wrong or no cluster runs; suspicions alone are 0.
    """
    cluster = find_cluster(name)
    liveness = load_spec(cluster.folder.spec).liveness
    looks = take_looks(cluster, max(seconds, 2 * liveness.heartbeat_s))
    num_processes, found = len(looks[-1].launcher.processes), examine(looks, liveness)
    if as_json:
        findings = [{"check": check, **asdict(finding)} for check, finding in found]
        about = {"name": cluster.state.name, "num_processes": num_processes, "num_checks": len(CHECKS)}
        print_json({**about, "findings": findings})
    else:
        show_findings(found, num_processes, text_console())
    if any(finding.severity == "wrong" for _, finding in found):
        raise typer.Exit(1)


def take_looks(cluster: RunningCluster, seconds: float) -> list[Look]:
    """Look at a cluster now and for `seconds` again and again. Raises LaunchError."""
    num_pauses = max(1, round(seconds / LOOK_S))
    router = RouterView(cluster.state.admin_socket, cluster.state.endpoint)
    try:
        looks = [_look(cluster, router)]
        for _ in range(num_pauses):
            time.sleep(seconds / num_pauses)
            looks.append(_look(cluster, router))
        return looks
    finally:
        router.close()


def show_findings(found: Named, num_processes: int, console: Console) -> None:
    """Print what was found for people."""
    seen = f"{num_processes} processes, {len(CHECKS)} checks"
    if not found:
        console.print(f"everything is well: {seen}", highlight=False)
        return
    num_wrong = sum(finding.severity == "wrong" for _, finding in found)
    console.print(f"{num_wrong} wrong, {len(found) - num_wrong} suspicious: {seen}", highlight=False)
    for check, finding in found:
        line = f"{finding.severity}: {finding.subject}: {finding.seen}"
        console.print(line, style=COLORS[finding.severity], markup=False, highlight=False, soft_wrap=True)
        more = f"    should be: {finding.expected}   [{check}]\n    hint: {finding.hint}"
        console.print(more, markup=False, highlight=False, soft_wrap=True)


def _look(cluster: RunningCluster, router: RouterView) -> Look:
    try:
        launcher = LauncherDocument.model_validate(cluster.status())
        answer = router.answer(ROUTER_TIMEOUT_S)
        return Look(launcher, None if answer is None else RouterDocument.model_validate_json(answer))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise LaunchError(
            f"the status of {cluster.state.name} is not understood: {where or 'all of it'}: {first['msg']}",
            hint="was it started by another version? `twinpool down`, then `twinpool up`",
        ) from error
