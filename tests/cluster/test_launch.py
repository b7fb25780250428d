"""A whole cluster of stand-in roles under a real embedded Ray: up, status, scale, deaths of every kind, down.

The roles' own behaviour is tested end to end elsewhere; here it is who starts, watches and ends them.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

Eventually = Callable[[Callable[[], object], float], None]


class User(Protocol):
    """See conftest.py."""

    folder: Path
    cache: Path
    env: dict[str, str]

    def run(self, *arguments: str, stdin: str = "", timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]": ...
    def start(self, *arguments: str) -> "subprocess.Popen[str]": ...
    def up(self, *arguments: str) -> dict[str, Any]: ...
    def status(self, name: str = "twinpool") -> dict[str, Any]: ...
    def row(self, process: str) -> dict[str, Any]: ...
    def spec(self, text: str) -> str: ...
    def processes(self) -> list[str]: ...


def states(user: User) -> dict[str, str]:
    return {row["name"]: row["state"] for row in user.status()["processes"]}


def is_ready(user: User) -> bool:
    """Whether the cluster of this user is up; false as well while there is nobody to ask."""
    return user.run("status", "--json").stdout.count('"state": "ready"') == 4


def test_status_shows_every_process(cluster_user: User) -> None:
    status = cluster_user.status()
    assert status["state"] == "ready"
    assert json.loads(cluster_user.run("status", "--json").stdout).keys() == status.keys()
    assert {row["name"]: row["state"] for row in status["processes"]} == {
        "router": "ready",
        "prompt-0": "ready",
        "completion-0": "ready",
    }
    assert status["processes"][1]["load"]["num_free_blocks"] == 97
    assert len({row["pid"] for row in status["processes"]}) == 3
    text = cluster_user.run("status").stdout
    assert "prompt-0" in text
    assert "97/100" in text


def test_the_doctor_finds_nothing_wrong_until_there_is(cluster_user: User) -> None:
    """Workers that other tests have killed leave suspicions at most; what the router says itself is looked at."""
    done = cluster_user.run("doctor", "--json", "--seconds", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert (answer["name"], answer["num_processes"]) == ("twinpool", 3)
    assert "wrong" not in {finding["severity"] for finding in answer["findings"]}
    told = Path(cluster_user.status()["socket_folder"]) / "says"
    told.write_text(json.dumps({"loop_lag_s": 9.0}))
    try:
        done = cluster_user.run("doctor", "--seconds", "0.5")
        assert done.returncode == 1
        assert "\nwrong: router: its loop was 9.00 s late\n    should be: at most 0.5 s   [loop_lag]\n" in done.stdout
        told.write_text(json.dumps({"uptime_s": "soon"}))
        done = cluster_user.run("doctor", "--seconds", "0.5")
        assert done.returncode == 1
        assert "error: the status of twinpool is not understood: uptime_s: " in done.stderr
        assert "hint: was it started by another version?" in done.stderr
    finally:
        told.unlink()


def test_secrets_are_private(cluster_user: User) -> None:
    """The token of the embedded Ray is readable by its owner only, and so is the folder of the sockets."""
    token = cluster_user.cache / "runs" / "twinpool" / "ray-token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert Path(cluster_user.status()["socket_folder"]).stat().st_mode & 0o777 == 0o700
    assert token.read_text() not in cluster_user.run("logs", "launcher").stdout


def test_roles_get_threads_and_logs(cluster_user: User) -> None:
    done = cluster_user.run("logs", "prompt-0", "--tail", "50")
    assert done.returncode == 0
    assert "prompt-0 threads 1" in done.stdout


def test_roles_run_at_the_priority_of_whoever_started_them(cluster_user: User) -> None:
    """Ray's workers have niceness 15: any other program, the client too, made prefills take twice as long."""
    for row in cluster_user.status()["processes"]:
        assert os.getpriority(os.PRIO_PROCESS, row["pid"]) == os.getpriority(os.PRIO_PROCESS, 0), row["name"]


def test_a_second_cluster_of_that_name_is_refused(cluster_user: User) -> None:
    done = cluster_user.run("up", "--detach", "--port", "0")
    assert done.returncode == 1
    assert "a cluster named twinpool already runs at http://127.0.0.1:" in done.stderr
    assert "hint: `twinpool down --name twinpool`" in done.stderr
    assert cluster_user.status()["state"] == "ready"


def test_a_killed_worker_is_back_within_two_seconds(cluster_user: User, eventually: Eventually) -> None:
    before = cluster_user.row("prompt-0")
    os.kill(before["pid"], signal.SIGKILL)
    eventually(lambda: cluster_user.row("prompt-0")["pid"] not in (None, before["pid"]), 2.0)
    eventually(lambda: cluster_user.row("prompt-0")["state"] == "ready", 2.0)
    status = cluster_user.status()
    row = next(row for row in status["processes"] if row["name"] == "prompt-0")
    assert row["num_restarts"] == before["num_restarts"] + 1
    assert row["last_exit"]["what"] == "killed by SIGKILL"
    assert any(i["what"] == f"pid {before['pid']} killed by SIGKILL" for i in status["incidents"])


def test_a_killed_supervisor_is_replaced(cluster_user: User, eventually: Eventually) -> None:
    """Its child dies with it, nobody's politeness needed; then both come back, and the status tells."""
    before = cluster_user.row("completion-0")
    os.kill(before["supervisor_pid"], signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{before['pid']}").exists(), 3.0)
    eventually(lambda: cluster_user.row("completion-0")["state"] == "ready", 10.0)
    after = cluster_user.row("completion-0")
    assert after["pid"] != before["pid"]
    assert after["num_restarts"] == before["num_restarts"] + 1
    assert after["last_exit"]["what"] == f"its supervisor (pid {before['supervisor_pid']}) died"


def test_status_works_while_the_router_is_down(cluster_user: User, eventually: Eventually) -> None:
    pid = cluster_user.row("router")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert states(cluster_user)["router"] == "starting"
    finally:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: set(states(cluster_user).values()) == {"ready"}, 5.0)


@pytest.mark.slow
def test_down_lets_requests_finish_and_down_now_does_not(user: User, eventually: Eventually) -> None:
    """The router is asked first and the workers live on meanwhile; --now asks it again, which ends it at once."""
    user.up()
    worker = user.row("completion-0")["pid"]
    (Path(user.status()["socket_folder"]) / "busy").touch()
    waiting = user.start("down")
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "3 requests may finish, within 30 s; `down --now` ends them\n"
    assert user.status()["state"] == "stopping"
    assert Path(f"/proc/{worker}").exists()
    done = user.run("down", "--now")
    assert done.returncode == 0, done.stderr
    assert waiting.wait(30) == 0
    assert not Path(f"/proc/{worker}").exists()


def test_scale_adds_and_removes_the_highest_numbers(cluster_user: User) -> None:
    done = cluster_user.run("scale", "--prompt-workers", "3", "--completion-workers", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["added"] == ["prompt-1", "prompt-2", "completion-1"]
    assert set(states(cluster_user).values()) == {"ready"}
    leaving = [cluster_user.row(name)["pid"] for name in ("prompt-1", "prompt-2", "completion-1")]
    done = cluster_user.run("scale", "--prompt-workers", "1", "--completion-workers", "1")
    assert done.returncode == 0, done.stderr
    assert "removed: prompt-1, prompt-2, completion-1" in done.stdout
    assert list(states(cluster_user)) == ["router", "prompt-0", "completion-0"]
    assert not [pid for pid in leaving if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("code", "reason", "num_lives"),
    [
        ("1", "died too often, last: exited with code 1", 5),
        ("3", "exited with code 3: the router refused it", 1),
    ],
)
def test_a_worker_that_cannot_live_fails_with_the_reason(
    cluster_user: User, code: str, reason: str, num_lives: int
) -> None:
    """A crash loop is given up; a refusal is final at once. The rest of the cluster goes on."""
    others = {row["name"]: (row["state"], row["pid"]) for row in cluster_user.status()["processes"]}
    run_folder = Path(cluster_user.status()["socket_folder"])
    log = cluster_user.cache / "runs" / "twinpool" / "logs" / "prompt-1.log"
    log.unlink(missing_ok=True)
    (run_folder / "prompt-1.exit").write_text(code)
    done = cluster_user.run("scale", "--prompt-workers", "2", "--timeout", "30")
    assert done.returncode == 1
    assert "prompt-1 (failed)" in done.stderr
    row = cluster_user.row("prompt-1")
    assert (row["state"], row["reason"], row["num_restarts"]) == ("failed", reason, num_lives - 1)
    assert log.read_text().count("prompt-1 threads") == num_lives
    after = {row["name"]: (row["state"], row["pid"]) for row in cluster_user.status()["processes"]}
    assert {name: after[name] for name in others} == others
    (run_folder / "prompt-1.exit").unlink()
    assert cluster_user.run("scale", "--prompt-workers", "1").returncode == 0


def test_chat_streams_and_draws_the_timeline(cluster_user: User) -> None:
    done = cluster_user.run("chat", "-", "--timing", stdin="two pools")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("You said: two pools\n")
    assert "= TTFT             47.0 ms" in done.stdout
    assert "96% of the KV" in done.stdout


def test_chat_says_what_the_endpoint_refused(cluster_user: User) -> None:
    done = cluster_user.run("chat", "fail")
    assert done.returncode == 1
    assert "this prompt is refused" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_launchers_death_ends_everything(user: User, eventually: Eventually) -> None:
    """kill -9 of the launcher: no role survives 3 s. The next `up` clears the stale state; Ctrl-C ends that one."""
    ready = user.up("--prompt-workers", "2")
    pids = [row["pid"] for row in user.status()["processes"]]
    stale = user.status()["socket_folder"]
    os.kill(ready["launcher_pid"], signal.SIGKILL)
    eventually(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], 3.0)
    done = user.run("status")
    assert done.returncode == 1
    assert "no cluster is running" in done.stderr
    assert Path(stale).exists()
    process = user.start("up", "--port", "0")
    eventually(lambda: is_ready(user), 30.0)
    assert not Path(stale).exists()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30.0)
    assert process.returncode == 0, stderr
    assert "curl http://127.0.0.1:" in stdout
    assert "nothing is left running" in stdout
    assert user.processes() == []
    again = user.run("down")
    assert again.returncode == 0
    assert "no cluster was running" in again.stdout


def test_foreground_death_stops_the_launcher(user: User, eventually: Eventually) -> None:
    """kill -9 of `twinpool up` itself: the launcher sees its pipe close and ends the cluster in order."""
    process = user.start("up", "--port", "0")
    eventually(lambda: is_ready(user), 30.0)
    process.kill()
    process.communicate()
    eventually(lambda: not user.processes(), 15.0)
    assert not (user.cache / "runs" / "twinpool" / "state.json").exists()


def test_up_fails_with_the_last_log_lines(user: User) -> None:
    """A worker that finds its configuration wrong is not restarted, and `up` says so with what it wrote."""
    spec = user.spec("completion: {env: {STAND_IN_EXIT: '2'}}")
    done = user.run("up", spec, "--port", "0")
    assert done.returncode == 1
    assert "completion-0 failed (exited with code 2: its configuration is wrong)" in done.stderr
    assert "last lines of completion-0" in done.stdout
    assert done.stdout.count("completion-0 threads") == 1
    assert user.processes() == []


def test_timeout_names_who_is_late(user: User) -> None:
    """Regression: with a router that takes its time to end, nothing was said until all had ended."""
    spec = user.spec("prompt: {env: {STAND_IN_LATE: '1', STAND_IN_BUSY: '1'}}")
    done = user.run("up", spec, "--port", "0", "--timeout", "2")
    assert done.returncode == 1
    assert "not ready within 2 s: prompt-0 starting" in done.stderr
    assert "prompt-0 threads" in done.stdout


def test_a_model_that_cannot_be_fetched(user: User) -> None:
    done = user.run("up", "--model", "missing", "--port", "0")
    assert done.returncode == 1
    assert "the model missing could not be fetched: no such model: missing" in done.stderr


def test_a_port_in_use_is_refused(user: User) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = user.run("up", "--port", str(port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "--port 0" in done.stderr


def test_demo_leaves_nothing(user: User) -> None:
    done = user.run("demo")
    assert done.returncode == 0, done.stderr
    assert "You said: Explain" in done.stdout
    assert "= TTFT" in done.stdout
    assert user.processes() == []


def kill_session(session: int) -> None:
    """End a Ray at once: its own way of stopping takes long, and `ray stop` ends every Ray there is."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture
def ray_address(user: User) -> Iterator[str]:
    """An existing Ray with two logical GPUs, a label, and a token of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token = user.folder / "foreign-token"
    token.write_text("0123456789abcdef" * 4)
    user.env.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"})
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1"]
    ray += [f"--port={port}", "--num-cpus=8", "--num-gpus=2", "--labels=zone=a", "--include-dashboard=false"]
    ray += [f"--temp-dir={user.folder}/ray", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    env = os.environ | user.env | {"PYTHONPATH": str(Path(__file__).parent)}
    with (user.folder / "ray.log").open("w") as log:
        process = subprocess.Popen(ray, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        kill_session(process.pid)
        process.wait(10.0)


@pytest.mark.slow
def test_an_existing_ray(user: User, ray_address: str, eventually: Eventually) -> None:
    """Labels and GPUs are the cluster's; each process sees its own GPU only; `down` leaves the user's Ray alone."""
    pools = "prompt: {num_gpus: 1, label_selector: {zone: a}}\ncompletion: {num_gpus: 1, label_selector: {zone: a}}"
    eventually(lambda: "--block" in (user.folder / "ray.log").read_text(), 30.0)
    user.up(user.spec(pools), "--address", ray_address)
    logs = [user.run("logs", name).stdout for name in ("prompt-0", "completion-0")]
    seen = sorted(text.split("threads 1 ")[1].split()[0] for text in logs)
    assert seen == ["0", "1"]
    elsewhere = user.run(
        "up", user.spec("prompt: {label_selector: {zone: b}}"), "--name", "b", "--port", "0", "--address", ray_address
    )
    assert elsewhere.returncode == 1
    assert "prompt-0 asks for a node labelled zone=b; labels there are: zone=a" in elsewhere.stderr
    too_many = user.run(
        "up", user.spec("prompt: {num_gpus: 64}"), "--name", "b", "--port", "0", "--address", ray_address
    )
    assert too_many.returncode == 1
    assert "prompt-0 needs 64 GPU, but no node has that many left" in too_many.stderr
    user.up(user.spec(""), "--name", "beside", "--address", ray_address)
    assert user.run("down", "--name", "twinpool").returncode == 0
    assert user.status("beside")["state"] == "ready"
    assert user.run("down", "--name", "beside").returncode == 0  # while its Ray lives
