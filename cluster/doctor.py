"""What is wrong with a running cluster, from what it said about itself at several looks. Pure.

Each check is a function that yields findings; `wrong` breaks an invariant, `suspicious` may have a good reason. Looks
are some heartbeats apart: what holds at all of them is no accident of the moment. Knows nothing of how looks are taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .config import LivenessSpec
from .status_documents import LauncherDocument, LoadDocument, RouterDocument, WorkerDocument

Severity = Literal["wrong", "suspicious"]
RECENT_S = 600.0  # an incident is of interest for so long
WANTED_INCIDENTS = ("joined", "gone: stopped", "removed by scale")  # how those begin that somebody meant to happen


@dataclass(frozen=True)
class Look:
    launcher: LauncherDocument
    router: RouterDocument | None  # none: it did not answer


@dataclass(frozen=True)
class Finding:
    severity: Severity
    subject: str
    seen: str
    expected: str
    hint: str


@dataclass(frozen=True)
class Case:
    """One cluster's looks, the oldest first."""

    looks: Sequence[Look]
    liveness: LivenessSpec

    @property
    def launcher(self) -> LauncherDocument:
        return self.looks[-1].launcher

    @property
    def router(self) -> RouterDocument | None:
        return self.looks[-1].router

    @property
    def workers(self) -> tuple[WorkerDocument, ...]:
        return self.router.workers if self.router else ()

    @property
    def watched_s(self) -> float:
        """How long the same router was looked at; 0 when another began meanwhile or one look failed."""
        routers = [look.router for look in self.looks if look.router is not None]
        is_same = len(routers) == len(self.looks) and len({router.incarnation for router in routers}) == 1
        return routers[-1].uptime_s - routers[0].uptime_s if is_same else 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing was queued or running at any look."""
        routers = [look.router for look in self.looks]
        return self.watched_s > 0 and not any(router is None or router.queued or router.running for router in routers)

    @property
    def is_settled(self) -> bool:
        """Whether all leases have ended of which somebody who came or went did not tell."""
        quiet_s = self.liveness.lease_s + self.watched_s
        is_young = self.router is None or self.router.uptime_s < quiet_s
        return not is_young and all(incident.at_s_ago >= quiet_s for incident in self.launcher.incidents)

    def is_heard(self, worker: WorkerDocument) -> bool:
        """Whether it has sent a heartbeat since the first look."""
        return worker.last_heartbeat_s < self.watched_s

    def fewest(self, worker: WorkerDocument, count: Callable[[LoadDocument], int]) -> int:
        """Return the smallest count that a process reported at any look; 0 unless it has reported since the first."""
        then = [look.router.worker(worker.name, worker.pid) if look.router else None for look in self.looks]
        counts = [count(known.load) if known and known.load else 0 for known in then]
        return min(counts) if self.is_heard(worker) else 0


def examine(looks: Sequence[Look], liveness: LivenessSpec) -> list[tuple[str, Finding]]:
    """Return the findings, the worst first, each with the name of its check."""
    assert len(looks) >= 2, "one look shows no change"
    case = Case(looks, liveness)
    found = [(name, finding) for name, check in CHECKS.items() for finding in check(case)]
    return sorted(found, key=lambda named: named[1].severity != "wrong")


def check_processes(case: Case) -> Iterator[Finding]:
    """All that was started is ready. Of a router that is silent the launcher cannot tell what its workers do."""
    state = case.launcher.state
    if state in ("starting", "stopping"):
        hint = "ask again when it is up" if state == "starting" else "`twinpool up` starts it again once it has ended"
        yield Finding("wrong", case.launcher.name, f"the cluster is {state}", "ready", hint)
    for process in case.launcher.processes:
        is_unknown = case.router is None and process.role != "router" and process.state == "starting" and process.pid
        if process.state != "ready" and not is_unknown:
            reason = f": {process.reason}" if process.reason else ""
            hint = f"`twinpool logs {process.name}` says why"
            yield Finding("wrong", process.name, f"it is {process.state}{reason}", "ready", hint)
    is_up = any(process.role == "router" and process.state == "ready" for process in case.launcher.processes)
    if case.router is None and is_up:
        hint = "`twinpool logs router`; a busy machine can be the reason, then ask again"
        yield Finding("wrong", "router", "its admin socket does not answer", "an answer", hint)


def check_membership(case: Case) -> Iterator[Finding]:
    """Launcher and router know the same workers. Who comes or goes is known to one of them for a moment only."""
    if not case.watched_s:
        return
    pids = [_pids(look) for look in case.looks]
    for name in pids[-1]:
        at_all_looks = {then.get(name) for then in pids}
        launched, joined = pids[-1][name]
        if len(at_all_looks) > 1 or launched == joined:
            continue
        seen = f"the launcher runs {_process(launched)}, the router knows {_process(joined)}"
        is_silent = any(worker.name == name and not case.is_heard(worker) for worker in case.workers)
        hint = f"`twinpool logs {name}`: does it load, was it refused? then `twinpool logs launcher`"
        yield Finding("suspicious" if is_silent else "wrong", name, seen, "the same process for both", hint)


def _pids(look: Look) -> dict[str, tuple[int | None, int | None]]:
    """Return each worker's pid, as the launcher and as the router knows it."""
    launched = {p.name: p.pid for p in look.launcher.processes if p.role != "router"}
    joined = {worker.name: worker.pid for worker in look.router.workers} if look.router else {}
    return {name: (launched.get(name), joined.get(name)) for name in sorted({*launched, *joined})}


def _process(pid: int | None) -> str:
    return "no process" if pid is None else f"pid {pid}"


def check_heartbeats(case: Case) -> Iterator[Finding]:
    for worker in case.workers:
        silent_s = worker.last_heartbeat_s
        if silent_s >= case.liveness.suspect_after_s:
            severity = "wrong" if silent_s >= case.liveness.gone_after_s else "suspicious"
            expected = f"one every {case.liveness.heartbeat_s:g} s"
            hint = f"is pid {worker.pid} stopped, or the machine overloaded? `twinpool logs {worker.name}`"
            yield Finding(severity, worker.name, f"no heartbeat for {silent_s:.1f} s", expected, hint)


def check_progress(case: Case) -> Iterator[Finding]:
    """An engine that computes moves between two looks; the spec says how long one step may take at most."""
    for worker in case.workers:
        stuck_s = worker.last_progress_s
        if case.is_heard(worker) and stuck_s >= case.watched_s:
            severity = "wrong" if stuck_s >= case.liveness.stalled_after_s else "suspicious"
            seen = f"no progress for {stuck_s:.1f} s, though its heartbeats come"
            expected = f"some within a step; liveness.stalled_after_s is {case.liveness.stalled_after_s:g}"
            hint = f"look again: a long step ends, a hang stays until pid {worker.pid} ends itself and is started anew"
            yield Finding(severity, worker.name, seen, expected, hint)


def check_blocks(case: Case) -> Iterator[Finding]:
    """I1: every block has one owner. Free, cached and granted ones are counted apart; sequences hold the rest."""
    for worker in case.workers:
        load = worker.load
        if load is None:
            continue
        parts = (load.num_free_blocks, load.num_cached_blocks, load.num_granted_blocks)
        if min(parts) < 0 or sum(parts) > load.num_blocks or load.num_blocks != worker.num_blocks:
            seen = "{} free + {} cached + {} granted of {} blocks".format(*parts, load.num_blocks)
            expected = f"none negative, together at most the {worker.num_blocks} that it joined with"
            hint = f"a bug: keep `twinpool logs {worker.name}` and report it; end pid {worker.pid} to go on"
            yield Finding("wrong", worker.name, seen, expected, hint)


def check_leaks(case: Case) -> Iterator[Finding]:
    """I1 at rest: while the router has no request, all blocks are free or cached."""
    for worker in case.workers if case.is_idle else ():
        num_held = case.fewest(worker, lambda load: load.num_held_blocks)
        if num_held > 0:
            seen = f"{num_held} of {worker.num_blocks} blocks were held all the time, while no request ran or waited"
            yield Finding(_at_rest(case), worker.name, seen, "none held at rest", _rest_hint(case, worker))


def check_sequences(case: Case) -> Iterator[Finding]:
    for worker in case.workers if case.is_idle else ():
        num_sequences = case.fewest(worker, lambda load: load.num_sequences)
        if num_sequences > 0:
            seen = f"{num_sequences} sequences stayed all the time, while no request ran or waited"
            yield Finding(_at_rest(case), worker.name, seen, "none without a request", _rest_hint(case, worker))


def _at_rest(case: Case) -> Severity:
    return "wrong" if case.is_settled else "suspicious"


def _rest_hint(case: Case, worker: WorkerDocument) -> str:
    if not case.is_settled:
        return f"somebody came or went lately: look again in {case.liveness.lease_s:g} s, when leases have ended"
    return f"`twinpool calibrate` holds some while it runs; else a bug: report it; end pid {worker.pid} to go on"


def check_queue(case: Case) -> Iterator[Finding]:
    for role in ("PROMPT", "COMPLETION") if case.router and case.router.queued else ():
        if not any(worker.role == role and worker.state in ("alive", "ready") for worker in case.workers):
            seen = f"no {role} worker is ready while {case.router.queued if case.router else 0} requests wait"
            hint = "`twinpool status` says what became of its workers"
            yield Finding("wrong", f"{role} pool", seen, "at least one", hint)


def check_loop_lag(case: Case) -> Iterator[Finding]:
    """Beyond half of `suspect_after_s` the router no longer trusts its own clock (membership.py)."""
    late_s = case.router.loop_lag_s if case.router else 0.0
    if late_s > case.liveness.heartbeat_s:
        severity = "wrong" if late_s > case.liveness.suspect_after_s / 2 else "suspicious"
        hint = "the machine is overloaded: fewer workers or threads than cores; or report what the router did"
        seen, expected = f"its loop was {late_s:.2f} s late", f"at most {case.liveness.heartbeat_s:g} s"
        yield Finding(severity, "router", seen, expected, hint)


def check_messages(case: Case) -> Iterator[Finding]:
    num_malformed = case.router.malformed_messages if case.router else 0
    if num_malformed > 0:
        earlier = case.looks[0].router
        is_more = bool(case.watched_s and earlier and num_malformed > earlier.malformed_messages)
        seen = f"{num_malformed} malformed messages dropped since it began" + (", and they go on" if is_more else "")
        hint = "do all processes run the same version? `twinpool logs router` names who sent them"
        yield Finding("wrong" if is_more else "suspicious", "router", seen, "none", hint)


def check_agreement(case: Case) -> Iterator[Finding]:
    """I7 within a pool, and the limits that all its workers take from one spec."""
    for role in ("PROMPT", "COMPLETION"):
        pool = [worker for worker in case.workers if worker.role == role]
        for field in ("fingerprint", "dtype", "block_size", "max_model_len"):
            values = {worker.name: getattr(worker, field) for worker in pool}
            if len(set(values.values())) > 1:
                seen = f"{field} differs: " + ", ".join(f"{name} has {value}" for name, value in values.items())
                hint = "were the model's files or the spec changed meanwhile? `twinpool down`, then `twinpool up`"
                yield Finding("wrong", f"{role} pool", seen, "the same on every worker", hint)


def check_incidents(case: Case) -> Iterator[Finding]:
    """Who died or was given up lately, one finding a worker."""
    lately: dict[str, list[str]] = {}
    for incident in sorted(case.launcher.incidents, key=lambda incident: incident.at_s_ago):
        if incident.at_s_ago <= RECENT_S and not incident.what.startswith(WANTED_INCIDENTS):
            lately.setdefault(incident.worker, []).append(f"{incident.what}, {incident.at_s_ago:.0f} s ago")
    for worker, words in lately.items():
        more = f" (and {len(words) - 1} more within {RECENT_S / 60:.0f} min)" if len(words) > 1 else ""
        hint = f"`twinpool status` lists them, `twinpool logs {worker}` may say why"
        yield Finding("suspicious", worker, words[0] + more, "no deaths", hint)


CHECKS: Mapping[str, Callable[[Case], Iterator[Finding]]] = {
    "processes": check_processes,
    "membership": check_membership,
    "heartbeats": check_heartbeats,
    "progress": check_progress,
    "blocks": check_blocks,
    "leaks": check_leaks,
    "sequences": check_sequences,
    "queue": check_queue,
    "loop_lag": check_loop_lag,
    "messages": check_messages,
    "agreement": check_agreement,
    "incidents": check_incidents,
}
