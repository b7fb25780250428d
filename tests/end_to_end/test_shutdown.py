"""SIGTERM drains the router: streams are counted to their end, what does not finish is ended in words, exit code 0."""

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_cluster import LiveCluster, wait_until

SLOW = {"engine": {"kind": "fake", "num_blocks": 64, "fake_seconds_per_row": 0.02}}
FIELDS = {"prompt": "hello", "ignore_eos": True, "return_token_ids": True}
HEALTH = {"/health": 503, "/health/ready": 503, "/health/live": 200, "/v1/models": 200}


def start(model_folder: Path, drain_s: float) -> LiveCluster:
    return LiveCluster(model_folder, {"prompt": SLOW, "completion": SLOW, "router": {"drain_s": drain_s}})


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Stream:
    """Reads a streamed completion in a thread."""

    def __init__(self, cluster: LiveCluster, pool: ThreadPoolExecutor, num_tokens: int) -> None:
        self.has_begun = threading.Event()
        self._request = {"model": cluster.model, "stream": True, "max_tokens": num_tokens, **FIELDS}
        self._url = cluster.url
        self._lines: Future[list[str]] = pool.submit(self._read)

    def _read(self) -> list[str]:
        lines: list[str] = []
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._request, timeout=60) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line:
                    self.has_begun.set()
                    lines.append(line)
        return lines

    def frames(self) -> list[dict[str, Any]]:
        """Return the frames once it has ended, which must be by [DONE]."""
        lines = self._lines.result(60)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line.startswith("data: ")]


def is_draining(cluster: LiveCluster) -> bool:
    return cluster.client.get("/health/ready").status_code == 503


def test_running_answers_finish_and_new_ones_are_refused(tiny_llama: Path, pool: ThreadPoolExecutor) -> None:
    """J1, J2: four streams and a whole answer come to their natural end, with nothing else to wait for."""
    with start(tiny_llama, drain_s=30) as cluster:
        streams = [Stream(cluster, pool, 40) for _ in range(4)]
        whole = pool.submit(cluster.complete, max_tokens=40, **FIELDS)
        for stream in streams:
            assert stream.has_begun.wait(20)
        wait_until(lambda: cluster.status()["running"] == 5, 20, "five running requests")
        cluster.kill("router", signal.SIGTERM)
        wait_until(lambda: is_draining(cluster), 10, "draining")
        body = {"model": cluster.model, **FIELDS}
        for path in ("/v1/completions", "/v1/chat/completions"):
            refused = cluster.client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
        for path, status in HEALTH.items():
            assert cluster.client.get(path).status_code == status, path
        for stream in streams:
            frames = stream.frames()
            assert sum(len(choice["token_ids"]) for frame in frames for choice in frame["choices"]) == 40
            assert [c["finish_reason"] for f in frames for c in f["choices"] if c["finish_reason"]] == ["length"]
        assert whole.result(30)["usage"]["completion_tokens"] == 40
        assert cluster.processes["router"].wait(20) == 0
        cluster.stop()
        assert {process.returncode for process in cluster.processes.values()} == {0}


def test_what_does_not_finish_in_time_is_ended_in_words(tiny_llama: Path, pool: ThreadPoolExecutor) -> None:
    """J4: an error frame and [DONE] for a stream, 503 for a whole answer; exit code 0 all the same."""
    with start(tiny_llama, drain_s=0.1) as cluster:
        stream = Stream(cluster, pool, 200)
        body = {"model": cluster.model, "max_tokens": 200, **FIELDS}
        whole = pool.submit(httpx.post, f"{cluster.url}/v1/completions", json=body, timeout=60)
        assert stream.has_begun.wait(20)
        wait_until(lambda: cluster.status()["running"] == 2, 20, "two running requests")
        cluster.kill("router", signal.SIGTERM)
        error = stream.frames()[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "draining")
        answer = whole.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in answer.headers
        assert cluster.processes["router"].wait(20) == 0


def test_a_second_signal_ends_at_once(tiny_llama: Path, pool: ThreadPoolExecutor) -> None:
    with start(tiny_llama, drain_s=600) as cluster:
        stream = Stream(cluster, pool, 200)
        assert stream.has_begun.wait(20)
        cluster.kill("router", signal.SIGTERM)
        wait_until(lambda: is_draining(cluster), 10, "draining")
        cluster.kill("router", signal.SIGINT)
        assert cluster.processes["router"].wait(20) == 0
        with pytest.raises((httpx.RemoteProtocolError, AssertionError)):
            stream.frames()
