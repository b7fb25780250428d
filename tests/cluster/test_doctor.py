"""The doctor's checks: each finding comes from looks that differ in one thing from those at a healthy cluster."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from rich.console import Console
from twinpool.cluster.commands.doctor import show_findings
from twinpool.cluster.config import LivenessSpec
from twinpool.cluster.doctor import CHECKS, Look, examine
from twinpool.cluster.protocol.messages import Load
from twinpool.cluster.status_documents import LauncherDocument, RouterDocument

LIVENESS = LivenessSpec()
SECONDS = 2.0  # between the first look and the last
Documents = dict[str, Any]
Change = Callable[[Documents], object]


def worker(name: str, pid: int) -> Documents:
    return {
        "name": name,
        "role": name.split("-")[0].upper(),
        "state": "alive",
        "pid": pid,
        "last_heartbeat_s": 0.3,
        "last_progress_s": 0.3,
        "fingerprint": "f1",
        "dtype": "float32",
        "block_size": 32,
        "num_blocks": 100,
        "max_model_len": 512,
        "load": Load(num_blocks=100, num_free_blocks=100).model_dump(),
    }


def process(name: str, pid: int) -> Documents:
    return {"name": name, "role": name.split("-")[0], "state": "ready", "reason": None, "pid": pid}


def documents(at_s: float) -> Documents:
    """Return what both sides of a healthy, idle cluster with two PROMPT workers say, `at_s` after the first look."""
    pids = {"prompt-0": 11, "prompt-1": 12, "completion-0": 13}
    return {
        "launcher": {
            "name": "twinpool",
            "state": "ready",
            "processes": [process("router", 10), *(process(name, pid) for name, pid in pids.items())],
            "incidents": [{"at_s_ago": 100.0 + at_s, "worker": "prompt-0", "what": "joined as PROMPT, pid 11"}],
        },
        "router": {
            "incarnation": "r1",
            "uptime_s": 100.0 + at_s,
            "queued": 0,
            "running": 0,
            "malformed_messages": 0,
            "loop_lag_s": 0.01,
            "workers": [worker(name, pid) for name, pid in pids.items()],
        },
    }


def named(rows: list[Documents], name: str) -> Documents:
    return next(row for row in rows if row["name"] == name)


def of_router(**values: Any) -> Change:
    return lambda said: said["router"].update(values)


def of_launcher(**values: Any) -> Change:
    return lambda said: said["launcher"].update(values)


def of_worker(name: str, **values: Any) -> Change:
    return lambda said: named(said["router"]["workers"], name).update(values)


def of_load(name: str, **values: Any) -> Change:
    return lambda said: named(said["router"]["workers"], name)["load"].update(values)


def of_process(name: str, **values: Any) -> Change:
    return lambda said: named(said["launcher"]["processes"], name).update(values)


def forgotten(side: str, rows: str, name: str) -> Change:
    return lambda said: said[side][rows].remove(named(said[side][rows], name))


def incident(at_s_ago: float, what: str) -> Change:
    row = {"at_s_ago": at_s_ago, "worker": "prompt-0", "what": what}
    return lambda said: said["launcher"]["incidents"].append(row)


def looks(*changes: Change, last: Change | None = None) -> list[Look]:
    """Return two looks, both changed so; `last` changes the second alone."""
    said = [documents(0.0), documents(SECONDS)]
    for change in changes:
        for each in said:
            change(each)
    if last is not None:
        last(said[1])
    return [look_at(each) for each in said]


def look_at(said: Documents) -> Look:
    router = RouterDocument.model_validate(said["router"]) if said["router"] else None
    return Look(LauncherDocument.model_validate(said["launcher"]), router)


def found(*changes: Change, last: Change | None = None) -> list[tuple[str, str, str]]:
    """Return check, severity and subject of each finding."""
    named_findings = examine(looks(*changes, last=last), LIVENESS)
    return [(check, finding.severity, finding.subject) for check, finding in named_findings]


def words(*changes: Change, last: Change | None = None) -> str:
    return " | ".join(finding.seen for _, finding in examine(looks(*changes, last=last), LIVENESS))


def test_a_healthy_cluster_has_no_findings() -> None:
    assert found() == []


def test_a_healthy_cluster_under_load_has_no_findings() -> None:
    """Blocks are free, granted or a sequence's; a step in progress is no hang; a queue before busy pools is normal."""
    busy = [of_router(queued=5, running=2), of_worker("prompt-1", last_progress_s=0.5)]
    shares = {"num_free_blocks": 60, "num_granted_blocks": 10, "num_sequences": 2}
    assert found(*busy, of_load("completion-0", **shares)) == []


@pytest.mark.parametrize("state", ["starting", "restarting", "stopping", "stopped", "failed", "suspect"])
def test_a_process_that_is_not_ready(state: str) -> None:
    change = of_process("prompt-1", state=state, reason="exited with code 3: the router refused it")
    assert found(change) == [("processes", "wrong", "prompt-1")]
    assert words(change) == f"it is {state}: exited with code 3: the router refused it"


@pytest.mark.parametrize("state", ["starting", "stopping"])
def test_a_cluster_that_is_not_up(state: str) -> None:
    """It may have no process yet, of which nothing is well."""
    nothing = of_launcher(state=state, processes=[], incidents=[])
    assert found(nothing, lambda said: said.update(router=None)) == [("processes", "wrong", "twinpool")]


def test_a_router_that_is_silent_is_one_finding() -> None:
    """The launcher calls every worker `starting` while the router does not answer; that is the same thing again."""

    def silence(said: Documents) -> None:
        said["router"] = None
        for row in said["launcher"]["processes"]:
            row["state"] = "starting"

    assert found(silence) == [("processes", "wrong", "router")]
    assert found(last=silence) == [("processes", "wrong", "router")]
    assert found(silence, of_process("prompt-1", state="failed", pid=None)) == [
        ("processes", "wrong", "router"),
        ("processes", "wrong", "prompt-1"),
    ]


def test_a_router_that_answers_the_launcher_only() -> None:
    assert found(last=lambda said: said.update(router=None)) == [("processes", "wrong", "router")]


def test_a_worker_that_the_launcher_does_not_know() -> None:
    stray = forgotten("launcher", "processes", "prompt-1")
    assert found(stray) == [("membership", "wrong", "prompt-1")]
    assert words(stray) == "the launcher runs no process, the router knows pid 12"


def test_a_worker_that_the_router_does_not_know() -> None:
    lost = forgotten("router", "workers", "prompt-1")
    assert found(lost) == [("membership", "wrong", "prompt-1")]
    assert words(lost) == "the launcher runs pid 12, the router knows no process"


def test_a_worker_with_another_pid() -> None:
    other = of_worker("prompt-1", pid=99)
    assert found(other) == [("membership", "wrong", "prompt-1")]
    assert words(other) == "the launcher runs pid 12, the router knows pid 99"


def test_a_dead_predecessor_that_is_not_given_up_yet_is_only_suspicious() -> None:
    """A killed worker stays in the router's table for `gone_after_s`, while the next one loads."""
    silent = of_worker("prompt-1", pid=99, last_heartbeat_s=2.5)
    assert ("membership", "suspicious", "prompt-1") in found(silent)
    assert "wrong" not in {severity for _, severity, _ in found(silent)}


def test_who_comes_or_goes_between_the_looks_is_nothing_wrong() -> None:
    assert found(last=forgotten("router", "workers", "prompt-1")) == []
    assert found(last=forgotten("launcher", "processes", "prompt-1")) == []
    assert found(last=of_worker("prompt-1", pid=99)) == []


@pytest.mark.parametrize(
    ("silent_s", "expected"),
    [
        (1.99, []),
        (2.0, [("heartbeats", "suspicious", "completion-0")]),
        (2.79, [("heartbeats", "suspicious", "completion-0")]),
        (2.8, [("heartbeats", "wrong", "completion-0")]),
    ],
)
def test_a_silent_worker(silent_s: float, expected: list[tuple[str, str, str]]) -> None:
    silent = of_worker("completion-0", last_heartbeat_s=silent_s, last_progress_s=silent_s)
    assert found(silent) == expected


@pytest.mark.parametrize(
    ("stuck_s", "expected"),
    [
        (1.99, []),
        (2.0, [("progress", "suspicious", "prompt-0")]),
        (2.39, [("progress", "suspicious", "prompt-0")]),
        (2.4, [("progress", "wrong", "prompt-0")]),
    ],
)
def test_heartbeats_without_progress(stuck_s: float, expected: list[tuple[str, str, str]]) -> None:
    """No progress since the first look, though a heartbeat came after it; the spec says what a hang is."""
    assert found(of_router(running=1), of_worker("prompt-0", last_progress_s=stuck_s)) == expected


def test_progress_is_not_judged_across_two_routers() -> None:
    restarted = of_router(incarnation="r2", uptime_s=1.0)
    assert found(of_router(running=1), of_worker("prompt-0", last_progress_s=5.0), last=restarted) == []


@pytest.mark.parametrize(
    "shares",
    [
        {"num_free_blocks": 101},
        {"num_free_blocks": -1},
        {"num_cached_blocks": 1},
        {"num_granted_blocks": 1},
        {"num_free_blocks": 99, "num_cached_blocks": 2},
        {"num_cached_blocks": -1},
        {"num_granted_blocks": -1},
        {"num_blocks": 101, "num_free_blocks": 101},
    ],
)
def test_blocks_that_do_not_add_up(shares: dict[str, int]) -> None:
    """Requests run, so that no leak is found beside it."""
    assert found(of_router(running=1), of_load("completion-0", **shares)) == [("blocks", "wrong", "completion-0")]


@pytest.mark.parametrize("name", ["prompt-0", "completion-0"])
def test_blocks_that_are_held_at_rest(name: str) -> None:
    held = of_load(name, num_free_blocks=97)
    assert found(held) == [("leaks", "wrong", name)]
    assert words(held) == "3 of 100 blocks were held all the time, while no request ran or waited"
    assert words(held, last=of_load(name, num_free_blocks=98)).startswith("2 of 100 ")


def test_cached_blocks_are_at_rest() -> None:
    assert found(of_load("completion-0", num_free_blocks=90, num_cached_blocks=10)) == []


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ([of_load("prompt-0", num_free_blocks=97)], of_load("prompt-0", num_free_blocks=100)),
        ([], of_load("prompt-0", num_free_blocks=97)),
        ([of_load("prompt-0", num_free_blocks=97), of_router(running=1)], of_router(running=0)),
        ([of_load("prompt-0", num_free_blocks=97)], of_router(queued=1)),
        ([of_load("prompt-0", num_free_blocks=97)], of_router(incarnation="r2")),
    ],
    ids=["freed", "taken just now", "ran at the first look", "queued at the last", "another router"],
)
def test_blocks_that_a_request_can_have_held(changes: list[Change], last: Change) -> None:
    assert found(*changes, last=last) == []


def test_what_was_reported_before_the_first_look_proves_no_leak() -> None:
    held = of_load("prompt-0", num_free_blocks=97)
    silent = of_worker("prompt-0", last_heartbeat_s=2.1, last_progress_s=2.1)
    assert {check for check, _, _ in found(held, silent)} == {"heartbeats"}


@pytest.mark.parametrize(
    ("seconds_ago", "severity"),
    [(6.9, "suspicious"), (7.0, "wrong")],
)
def test_a_lease_may_still_hold_blocks(seconds_ago: float, severity: str) -> None:
    """Of whoever died without a word the blocks are free after `lease_s`; that is 5 s, and the looks took 2 s."""
    held, expected = of_load("completion-0", num_free_blocks=97), [("leaks", severity, "completion-0")]
    assert found(held, incident(seconds_ago, "gone: stopped")) == expected
    first = of_router(uptime_s=seconds_ago - SECONDS)
    assert found(held, first, last=of_router(uptime_s=seconds_ago)) == expected


@pytest.mark.parametrize("name", ["prompt-0", "completion-0"])
def test_sequences_without_a_request(name: str) -> None:
    change = of_load(name, num_sequences=2)
    assert found(change) == [("sequences", "wrong", name)]
    assert found(change, of_router(running=1)) == []
    assert found(change, last=of_load(name, num_sequences=0)) == []


@pytest.mark.parametrize("role", ["prompt", "completion"])
def test_requests_that_wait_for_a_pool_without_workers(role: str) -> None:
    def suspect(said: Documents) -> None:
        for row in said["router"]["workers"]:
            row["state"] = "suspect" if row["role"] == role.upper() else "alive"

    assert found(of_router(queued=2), suspect) == [("queue", "wrong", f"{role.upper()} pool")]
    assert found(suspect) == []


@pytest.mark.parametrize(
    ("late_s", "expected"),
    [
        (0.5, []),
        (0.51, [("loop_lag", "suspicious", "router")]),
        (1.0, [("loop_lag", "suspicious", "router")]),
        (1.01, [("loop_lag", "wrong", "router")]),
    ],
)
def test_a_loop_that_is_late(late_s: float, expected: list[tuple[str, str, str]]) -> None:
    assert found(of_router(loop_lag_s=late_s)) == expected


def test_malformed_messages() -> None:
    """Those of long ago leave a suspicion; while they come, something is wrong."""
    assert found(of_router(malformed_messages=3)) == [("messages", "suspicious", "router")]
    assert found(last=of_router(malformed_messages=3)) == [("messages", "wrong", "router")]


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", "f2"), ("dtype", "bfloat16"), ("block_size", 16), ("max_model_len", 256)]
)
def test_workers_of_one_pool_that_differ(field: str, value: object) -> None:
    change = of_worker("prompt-1", **{field: value})
    assert found(change) == [("agreement", "wrong", "PROMPT pool")]
    assert f"{field} differs: prompt-0 has " in words(change)
    assert f"prompt-1 has {value}" in words(change)


def test_pools_may_have_limits_of_their_own() -> None:
    assert found(of_worker("completion-0", block_size=16, max_model_len=256)) == []


def test_a_worker_that_died_lately_is_suspicious() -> None:
    died = [incident(4.0, "pid 7 killed by SIGKILL"), incident(9.0, "gone: no heartbeat for 3.1 s")]
    assert found(*died) == [("incidents", "suspicious", "prompt-0")]
    assert words(*died) == "pid 7 killed by SIGKILL, 4 s ago (and 1 more within 10 min)"


@pytest.mark.parametrize(
    ("at_s_ago", "what"),
    [
        (601.0, "pid 7 killed by SIGKILL"),
        (4.0, "joined as PROMPT, pid 11"),
        (4.0, "gone: stopped"),
        (4.0, "removed by scale"),
    ],
)
def test_what_is_long_ago_or_meant_to_happen_is_not(at_s_ago: float, what: str) -> None:
    assert found(incident(at_s_ago, what)) == []


def test_a_worker_without_a_heartbeat_yet_is_judged_by_what_it_said() -> None:
    assert found(of_worker("prompt-0", load=None)) == []


def test_the_worst_comes_first_and_every_check_can_find_something() -> None:
    changes = [
        of_router(malformed_messages=1, loop_lag_s=2.0),
        of_worker("prompt-0", dtype="bfloat16", last_progress_s=4.0),
        of_worker("prompt-1", pid=99),
        of_load("completion-0", num_sequences=1, num_free_blocks=97, num_cached_blocks=-1),
        of_process("prompt-1", state="starting"),
        incident(4.0, "pid 7 killed by SIGKILL"),
    ]
    severities = [severity for _, severity, _ in found(*changes)]
    assert severities == sorted(severities, reverse=True)
    assert {"wrong", "suspicious"} == set(severities)
    checks = {check for check, _, _ in found(*changes)}
    assert set(CHECKS) - checks == {"heartbeats", "queue"}  # a silent worker proves no leak; a queue is no rest


def shown(*changes: Change) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        show_findings(examine(looks(*changes), LIVENESS), 4, console)
    return capture.get()


def test_findings_are_printed_with_what_to_do() -> None:
    assert shown() == f"everything is well: 4 processes, {len(CHECKS)} checks\n"
    assert shown(of_load("prompt-0", num_free_blocks=101)) == (
        f"1 wrong, 0 suspicious: 4 processes, {len(CHECKS)} checks\n"
        "wrong: prompt-0: 101 free + 0 cached + 0 granted of 100 blocks\n"
        "    should be: none negative, together at most the 100 that it joined with   [blocks]\n"
        "    hint: a bug: keep `twinpool logs prompt-0` and report it; end pid 11 to go on\n"
    )


def test_documents_lack_nothing_silently() -> None:
    """A field that a router does not send is an error, not a zero that looks well."""
    for field in documents(0.0)["router"]["workers"][0]:
        said = deepcopy(documents(0.0)["router"])
        del said["workers"][0][field]
        with pytest.raises(ValueError, match=field):
            RouterDocument.model_validate(said)
