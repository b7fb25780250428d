"""The keeper of one child, without Ray: starts, restarts, gives up, stops, and never leaves a process behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from twinpool.cluster.launch.child import ChildCommand, ChildKeeper, child_environment, tail_lines
from twinpool.cluster.launch.restarts import RestartPolicy

Eventually = Callable[[Callable[[], object], float], None]
Keep = Callable[..., ChildKeeper]
FAST = RestartPolicy(first_delay_s=0.01)
WAIT = "import signal; signal.signal(15, lambda *_: exit(0)); print('up', flush=True); signal.pause()"
SPAWN = """import subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(helper.pid, flush=True)
helper.wait()
"""


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    keepers: list[ChildKeeper] = []

    def start(code: str, policy: RestartPolicy = FAST, **env: str) -> ChildKeeper:
        command = ChildCommand("child", ("-c", code), tmp_path / "child.log", env)
        keepers.append(ChildKeeper(command, policy))
        keepers[-1].start()
        return keepers[-1]

    yield start
    for keeper in keepers:
        keeper.stop(1.0)
        assert keeper.status().pid is None


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def running_pid(keeper: ChildKeeper, eventually: Eventually) -> int:
    eventually(lambda: keeper.tail(5) and keeper.status().pid, 5.0)
    pid = keeper.status().pid
    assert pid is not None
    return pid


def test_a_killed_child_is_started_again(keep: Keep, eventually: Eventually) -> None:
    keeper = keep(WAIT)
    first = running_pid(keeper, eventually)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: keeper.status().num_restarts == 1 and keeper.status().pid, 2.0)
    status = keeper.status()
    assert status.state == "running"
    assert status.pid != first
    assert [(e.pid, e.words) for e in status.exits] == [(first, "killed by SIGKILL")]


def test_a_crash_loop_fails_with_the_reason(keep: Keep, eventually: Eventually) -> None:
    keeper = keep("import sys; sys.exit('no luck')")
    eventually(lambda: keeper.status().state == "failed", 10.0)
    status = keeper.status()
    assert status.reason == "died too often, last: exited with code 1"
    assert len(status.exits) == 5
    assert "no luck" in "\n".join(keeper.tail(20))


@pytest.mark.parametrize("code", [2, 3])
def test_wrong_configuration_and_refusal_are_final(keep: Keep, eventually: Eventually, code: int) -> None:
    keeper = keep(f"raise SystemExit({code})")
    eventually(lambda: keeper.status().state == "failed", 5.0)
    assert len(keeper.status().exits) == 1
    assert keeper.status().num_restarts == 0


def test_stop_ends_what_ignores_sigterm(keep: Keep, eventually: Eventually) -> None:
    ignoring = (
        "import signal, threading; signal.signal(15, signal.SIG_IGN); print('up', flush=True); threading.Event().wait()"
    )
    keeper = keep(ignoring)
    pid = running_pid(keeper, eventually)
    status = keeper.stop(0.2)
    assert status.state == "stopped"
    assert status.exits[-1].words == "killed by SIGKILL"
    assert not is_alive(pid)


def test_stop_lets_a_child_drain(keep: Keep, eventually: Eventually) -> None:
    keeper = keep(WAIT)
    running_pid(keeper, eventually)
    started_s = time.monotonic()
    assert keeper.stop(10.0).exits[-1].returncode == 0
    assert time.monotonic() - started_s < 5.0


def test_stop_ends_the_backoff_at_once(keep: Keep, eventually: Eventually) -> None:
    """A child that is between two lives must not be started again by a later wake-up."""
    keeper = keep("raise SystemExit(1)", RestartPolicy(first_delay_s=60.0, max_delay_s=60.0))
    eventually(lambda: keeper.status().state == "restarting", 5.0)
    assert keeper.stop(5.0).state == "stopped"
    assert len(keeper.status().exits) == 1


def test_grandchildren_die_with_the_child(keep: Keep, eventually: Eventually) -> None:
    """A worker's helper processes are in its group; a killed leader must not leave them."""
    keeper = keep(SPAWN)
    leader = running_pid(keeper, eventually)
    grandchild = int(keeper.tail(1)[0])
    os.kill(leader, signal.SIGKILL)
    eventually(lambda: not is_alive(grandchild), 2.0)


def test_child_does_not_outlive_a_killed_keeper(tmp_path: Path, eventually: Eventually) -> None:
    """The keeper's process gets SIGKILL, so nothing polite happens; the pipe's end has to do."""
    role = "import sys; from twinpool.cluster.role import exit_with_parent; exit_with_parent(int(sys.argv[-1])); "
    role += "import os, threading; print(os.getpid(), flush=True); threading.Event().wait()"
    keeper = (
        "import sys, threading; from pathlib import Path; from twinpool.cluster.launch.child import *; "
        f"ChildKeeper(ChildCommand('c', ('-c', {role!r}), Path(sys.argv[1]))).start(); threading.Event().wait()"
    )
    log = tmp_path / "c.log"
    process = subprocess.Popen([sys.executable, "-c", keeper, str(log)])
    eventually(lambda: tail_lines(log, 1), 10.0)
    child = int(tail_lines(log, 1)[0])
    assert is_alive(child)
    process.kill()
    process.wait()
    eventually(lambda: not is_alive(child), 1.0)


def test_child_gets_the_environment_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    env = child_environment({"OMP_NUM_THREADS": "1"})
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert env["OMP_NUM_THREADS"] == "1"
    assert not [key for key in env if key.startswith("RAY_")]
