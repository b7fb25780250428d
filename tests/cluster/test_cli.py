"""The command line itself: specs and flags, messages and exit codes, the timeline. No cluster is started here."""

import os
import subprocess
import threading
from pathlib import Path
from typing import Any, Protocol

import pytest
from twinpool.cluster.cli import build_app
from twinpool.cluster.commands.chat import Question
from twinpool.cluster.commands.status import ago
from twinpool.cluster.commands.timeline import draw_timeline
from twinpool.cluster.commands.up import SpecFlags, build_spec
from twinpool.cluster.launch.control import ControlServer, ask
from twinpool.cluster.launch.roles import Programs
from twinpool.cluster.launch.run_state import RunFolder, RunState, make_socket_folder
from twinpool.cluster.metrics import Timeline
from twinpool.cluster.protocol.errors import ConfigError, LaunchError
from typer.testing import CliRunner

COMMANDS = ("up", "demo", "status", "doctor", "logs", "scale", "down", "chat")


class User(Protocol):
    """See conftest.py."""

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]": ...
    def spec(self, text: str) -> str: ...


def timing(**changes: Any) -> dict[str, Any]:
    """Return what the endpoint sends for a request of 100 ms to its first token."""
    timeline = Timeline(
        queue_s=0.01,
        grant_s=0.01,
        prefill_queue_s=0.0,
        prefill_s=0.07,
        return_s=0.01,
        num_prompt_tokens=2048,
        num_output_tokens=5,
        num_cached_tokens=0,
        num_attempts=1,
        num_preemptions=0,
        num_kv_bytes=1_000_000,
        num_kv_bytes_arrived=950_000,
        last_kv_s=-0.01,
        second_token_s=0.02,
        end_s=0.2,
    )
    derived = {"ttft_s": timeline.ttft_s, "kv_share_hidden": timeline.kv_share_hidden}
    return {**vars(timeline), **derived, **changes}


def test_timeline_bars_follow_one_another() -> None:
    """Each bar starts where the one before ended, and all together are as long as the TTFT's."""
    lines = draw_timeline(timing())
    bars = {line[:14].strip(): line[28:68] for line in lines[:5]}
    assert bars["queue"] == "█" * 4 + " " * 36
    assert bars["grant"] == " " * 4 + "█" * 4 + " " * 32
    assert bars["prefill"] == " " * 8 + "█" * 28 + " " * 4
    assert bars["return"] == " " * 36 + "█" * 4
    assert "▏" in bars["prefill queue"]
    assert lines[5].startswith("= TTFT            100.0 ms  ")


def test_timeline_says_what_is_special_only_when_it_is() -> None:
    plain = "\n".join(draw_timeline(timing()))
    assert "95% of the KV (1.0 MB) had arrived before the prefill ended" in plain
    assert "attempts" not in plain
    assert "handed back" not in plain
    special = "\n".join(draw_timeline(timing(num_attempts=3, num_preemptions=2, kv_share_hidden=None)))
    assert "3 attempts" in special
    assert "resumed: 2" in special
    assert "of the KV" not in special


def test_timeline_of_a_single_token() -> None:
    """A request that ends at its first token has no second one and sends no KV."""
    text = "\n".join(draw_timeline(timing(second_token_s=None, num_kv_bytes=0, kv_share_hidden=None, ttft_s=0.0)))
    assert "second token" not in text
    assert "= TTFT              0.0 ms" in text


def test_flags_override_the_spec_file(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("name: mine\nprompt: {num_workers: 3}\nrouter: {port: 9000}\n")
    spec = build_spec(file, SpecFlags(completion_workers=2, port=0))
    assert (spec.name, spec.prompt.num_workers, spec.completion.num_workers, spec.router.port) == ("mine", 3, 2, 0)


def test_an_empty_pool_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("prompt: {num_workers: 0}\n")
    with pytest.raises(ConfigError, match=r"prompt.num_workers is 0.*\nhint: --prompt-workers 1"):
        build_spec(file, SpecFlags())


def test_question_asks_for_timing_only_when_wanted() -> None:
    body = Question("hi", system="be kind").body("m")
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert "timing" not in body
    assert Question("hi", wants_timing=True).body("m")["timing"] is True


@pytest.mark.parametrize(("seconds", "words"), [(3.2, "3 s"), (300.0, "5 min"), (9000.0, "2.5 h")])
def test_durations_in_words(seconds: float, words: str) -> None:
    assert ago(seconds) == words


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches(command: str) -> None:
    shown = CliRunner().invoke(build_app(Programs()), [command, "--help"])
    assert shown.exit_code == 0
    assert len(shown.output.splitlines()) > 5


def test_the_commands_are_listed(user: User) -> None:
    done = user.run("--help")
    assert done.returncode == 0
    assert [command for command in COMMANDS if f" {command} " not in done.stdout] == []


def test_costs_that_are_not_there_are_noticed_before_anything_starts(user: User) -> None:
    done = user.run("up", user.spec("router: {costs: absent.json}"))
    assert done.returncode == 2
    assert "cannot read the cost profile" in done.stderr
    assert "absent.json" in done.stderr
    assert user.run("status").returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [("up", "--bogus"), ("up", "--port", "70000"), ("nothing",), ("up", "absent.yaml"), ("up", "--name", "Not OK")],
)
def test_wrong_usage_and_wrong_specs_exit_with_2(user: User, arguments: tuple[str, ...]) -> None:
    done = user.run(*arguments)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("status",), ("doctor",), ("chat", "hi"), ("scale", "--prompt-workers", "2")])
def test_without_a_cluster_the_hint_is_up(user: User, arguments: tuple[str, ...]) -> None:
    done = user.run(*arguments)
    assert done.returncode == 1
    assert done.stderr == "error: no cluster is running\nhint: `twinpool up` starts one\n"


def test_logs_of_nobody(user: User) -> None:
    done = user.run("logs", "../../etc/passwd")
    assert done.returncode == 1
    assert "there is no log of" in done.stderr


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path))
    return tmp_path / "runs"


def test_a_name_is_claimed_once_and_freed_with_its_holder(runs: Path) -> None:
    folder = RunFolder("one")
    claim = folder.claim()
    assert folder.is_running()
    with pytest.raises(LaunchError, match="a cluster named one already runs"):
        RunFolder("one").claim()
    os.close(claim)
    assert not folder.is_running()
    assert (runs / "one" / "lock").stat().st_mode & 0o777 == 0o600


def test_clean_up_ends_what_a_dead_launcher_left(runs: Path) -> None:
    """A process that carries the run's mark is ended, one that does not is left alone."""
    folder = RunFolder("dead")
    folder.path.mkdir(parents=True)
    sockets = make_socket_folder()
    wait = ["python3", "-c", "import signal; print(flush=True); signal.pause()"]
    marked = subprocess.Popen(wait, env={"TWINPOOL_RUN": "r1", "PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE)
    other = subprocess.Popen(wait, env={"TWINPOOL_RUN": "r2", "PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE)
    try:
        for process in (marked, other):
            assert process.stdout is not None
            process.stdout.readline()
        reaper = threading.Thread(target=marked.wait)
        reaper.start()
        state = RunState(
            name="dead",
            run_id="r1",
            endpoint="http://127.0.0.1:1",
            model_name="m",
            ray_address="local",
            launcher_pid=marked.pid,
            socket_folder=str(sockets),
            started_at_s=0.0,
        )
        folder.write_state(state)
        assert folder.clean_up() == 1
        reaper.join(5.0)
        assert marked.returncode == -9
        assert other.poll() is None
        assert not sockets.exists()
        assert folder.read_state() is None
    finally:
        for process in (marked, other):
            process.kill()
            process.communicate()


def test_control_socket_answers_errors_as_errors(tmp_path: Path) -> None:
    def fail(_: dict[str, Any]) -> None:
        raise LaunchError("no", hint="try less")

    path = tmp_path / "c.sock"
    server = ControlServer(path, {"echo": lambda arguments: arguments, "fail": fail})
    try:
        assert ask(path, "echo", 2.0, {"a": [1, "ü"]}) == {"a": [1, "ü"]}
        with pytest.raises(LaunchError, match="no\nhint: try less"):
            ask(path, "fail", 2.0)
        with pytest.raises(LaunchError, match="not a request; known are echo, fail"):
            ask(path, "bogus", 2.0)
    finally:
        server.close()
    with pytest.raises(LaunchError, match="the launcher cannot be reached"):
        ask(path, "echo", 2.0)
