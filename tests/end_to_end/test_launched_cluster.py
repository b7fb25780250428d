"""`twinpool up` as a user runs it, with the real roles under a real Ray; the fake engine keeps it quick."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_cluster import wait_until
from twinpool.cluster.launch.control import ask
from twinpool.cluster.launch.run_state import RunState

TWINPOOL = Path(sys.executable).with_name("twinpool")
SPEC = """
name: launched
model: {model}
served_model_name: tiny
router: {{port: 0}}
prompt: {{num_workers: 2, num_cpus: 0.5, engine: {{kind: fake}}}}
completion: {{num_workers: 2, num_cpus: 0.5, engine: {{kind: fake}}}}
"""


class Launched:
    """A cluster brought up by the command line, and the commands that talk to it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.environment = {**os.environ, "TWINPOOL_CACHE": str(folder / "cache")}
        self.spec = folder / "spec.yaml"
        self.spec.write_text(SPEC.format(model=model))
        self.endpoint: str = json.loads(self.run("up", str(self.spec), "--detach", "--json"))["endpoint"]

    def run(self, *arguments: str) -> str:
        """Run a twinpool command; return what it printed."""
        done = subprocess.run(
            [str(TWINPOOL), *arguments], env=self.environment, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def process(self, name: str) -> dict[str, Any]:
        status = json.loads(self.run("status", "--name", "launched", "--json"))
        return next(process for process in status["processes"] if process["name"] == name)

    def seen_now(self, name: str) -> dict[str, Any]:
        """Ask the launcher itself, without the second that a new process takes."""
        folder = Path(self.environment["TWINPOOL_CACHE"]) / "runs" / "launched"
        state = RunState.model_validate_json((folder / "state.json").read_bytes())
        status = ask(state.control_socket, "status", 10.0)
        return next(process for process in status["processes"] if process["name"] == name)


@pytest.fixture
def launched(tmp_path: Path, tiny_llama: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path, tiny_llama)
    yield launched
    launched.run("down", "--name", "launched")


ABOUT_THE_MACHINE = {"heartbeats", "progress", "loop_lag"}  # its other programs can bring these about


def wrong_checks(launched: Launched) -> set[str]:
    """Return the checks of `twinpool doctor` that find something wrong; not those that a busy machine fails."""
    command = [str(TWINPOOL), "doctor", "--name", "launched", "--json"]
    done = subprocess.run(command, env=launched.environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode in (0, 1), done.stderr
    answer = json.loads(done.stdout)
    assert answer["num_processes"] == 5
    wrong = {finding["check"] for finding in answer["findings"] if finding["severity"] == "wrong"}
    assert done.returncode == (1 if wrong else 0)
    return wrong - ABOUT_THE_MACHINE


def test_a_killed_worker_is_restarted_and_the_stream_goes_on(launched: Launched) -> None:
    """kill -9 in mid-stream: the answer is the same, the pool is whole again in 15 s, status says what happened."""
    fields = {"model": "tiny", "prompt": "a river", "seed": 3, "ignore_eos": True, "return_token_ids": True}
    with httpx.Client(base_url=launched.endpoint, timeout=60.0) as client:
        right = client.post("/v1/completions", json={**fields, "max_tokens": 600}).json()["choices"][0]["token_ids"]
        tokens: list[int] = []
        victim = None
        with client.stream("POST", "/v1/completions", json={**fields, "max_tokens": 600, "stream": True}) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                if victim is None and len(tokens) > 10:
                    victim = launched.process("completion-0")
                    os.kill(victim["pid"], signal.SIGKILL)
                    os.kill(launched.process("completion-1")["pid"], signal.SIGKILL)
                    killed_s = time.monotonic()
        assert tokens == right
        assert victim is not None

        def is_whole() -> bool:
            after = launched.process("completion-0")
            return after["state"] == "ready" and after["pid"] != victim["pid"] and after["num_restarts"] == 1

        wait_until(is_whole, 15 - (time.monotonic() - killed_s), "the pool whole again")
    assert "SIGKILL" in launched.run("status", "--name", "launched")
    assert wrong_checks(launched) == set()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_dies_at_each_start_is_given_up_and_the_others_serve(launched: Launched) -> None:
    """Killed as soon as it runs, five times within 30 s: then it counts as failed, and requests never noticed."""
    fields = {"model": "tiny", "prompt": "a river", "seed": 3, "ignore_eos": True, "return_token_ids": True}
    others = {name: launched.seen_now(name)["pid"] for name in ("prompt-0", "prompt-1", "completion-0", "router")}
    killed: set[int] = set()

    def is_given_up() -> bool:
        row = launched.seen_now("completion-1")
        if row["state"] == "failed":
            return True
        if row["pid"] is not None and row["pid"] not in killed:
            os.kill(row["pid"], signal.SIGKILL)
            killed.add(row["pid"])
        answer = client.post("/v1/completions", json={**fields, "max_tokens": 30})
        assert answer.json()["choices"][0]["token_ids"] == right
        return False

    with httpx.Client(base_url=launched.endpoint, timeout=60.0) as client:
        right = client.post("/v1/completions", json={**fields, "max_tokens": 30}).json()["choices"][0]["token_ids"]
        began_s = time.monotonic()
        wait_until(is_given_up, 90, "the worker given up")
        took_s = time.monotonic() - began_s
    row = launched.seen_now("completion-1")
    assert (row["reason"], row["num_restarts"]) == ("died too often, last: killed by SIGKILL", 4)
    assert len(killed) == 5
    assert took_s < 60
    assert {name: launched.seen_now(name)["pid"] for name in others} == others
