"""The page for Prometheus over a scripted backend: what is counted, and that no client can make it grow."""

import asyncio
import json
import math
import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from twinpool.cluster.protocol.messages import Load
from twinpool.router.app import Door, create_app
from twinpool.router.auth import KEYS_VARIABLE, load_keys
from twinpool.router.drain import Drain
from twinpool.router.generation import FailureCode, GenerationFailed

USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAIT_S = 10
REJECTIONS = "twinpool_rejections_total"


def families(page: str) -> list[Metric]:
    return list(text_string_to_metric_families(page))


def series(page: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Return every series; fails when one is there twice."""
    found = [(s.name, tuple(sorted(s.labels.items()))) for family in families(page) for s in family.samples]
    assert len(found) == len(set(found))
    return set(found)


def metric(page: str, name: str, **labels: str) -> float | None:
    samples = [s for family in families(page) for s in family.samples]
    return next((s.value for s in samples if s.name == name and labels.items() <= s.labels.items()), None)


def status_of(loads: dict[str, Load | None]) -> dict[str, Any]:
    workers = [
        {
            "name": name,
            "role": name.split("-")[0].upper(),
            "state": "alive",
            "load": load.model_dump() if load else None,
        }
        for name, load in loads.items()
    ]
    return {"workers": workers, "queued": 3, "running": 2, "malformed_messages": 1}


def test_requests_tokens_and_latencies_are_counted(call: Any) -> None:
    """Each endpoint by its outcome; latencies of what ended well; the stages as the timeline has them."""
    call("POST", COMPLETIONS, json={"prompt": "hi"})
    call("POST", CHAT, json={"messages": USER, "stream": True})
    call("POST", CHAT, json={"messages": []})
    page = call("GET", "/metrics").text
    assert metric(page, "twinpool_requests_total", endpoint="completions", outcome="finished") == 1
    assert metric(page, "twinpool_requests_total", endpoint="chat", outcome="finished") == 1
    assert metric(page, "twinpool_requests_total", endpoint="chat", outcome="invalid_value") == 1
    for name in ("time_to_first_token", "time_per_output_token", "request"):
        assert metric(page, f"twinpool_{name}_seconds_count") == 2
    num_tokens = metric(page, "twinpool_output_tokens_total")
    assert num_tokens is not None
    assert metric(page, "twinpool_inter_token_latency_seconds_count") == num_tokens - 2
    assert metric(page, "twinpool_cached_tokens_total") == 8
    assert metric(page, "twinpool_kv_bytes_total") == 2000
    assert metric(page, "twinpool_kv_hidden_bytes_total") == 1900
    stages = {"queue": 0.02, "prefill": 0.2, "transfer": 0.0, "first_decode": 0.04, "decode": 0.32}
    for stage, sum_s in stages.items():
        assert metric(page, "twinpool_stage_seconds_sum", stage=stage) == pytest.approx(sum_s), stage
    assert metric(page, "twinpool_running_requests", mode="stream") == 0
    assert metric(page, "twinpool_build_info", model="tiny") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "is_rejection"), [("queue_full", True), ("no_worker", True), ("too_long", False), ("worker_failed", False)]
)
def test_rejections_have_their_reason(
    call: Any, backend: Any, code: FailureCode, is_rejection: bool, stream: bool
) -> None:
    """What was turned away for no fault of its own counts once more, by reason; it has no latencies."""
    backend.script = lambda request: [GenerationFailed(code, "Said by the dispatcher.")]
    call("POST", CHAT, json={"messages": USER, "stream": stream})
    page = call("GET", "/metrics").text
    rejections = {s.labels["reason"]: s.value for f in families(page) for s in f.samples if s.name == REJECTIONS}
    assert rejections.pop(code, 0) == is_rejection
    assert set(rejections.values()) == {0}, "the others are there, at 0"
    counted = {s.labels["outcome"]: s.value for f in families(page) for s in f.samples if s.name.endswith("ests_total")}
    assert sum(counted.values()) == 1
    assert metric(page, "twinpool_time_to_first_token_seconds_count") == 0


def test_a_failure_in_mid_stream_counts_its_tokens_but_no_latency(
    call: Any, backend: Any, say: Callable[..., Any]
) -> None:
    backend.script = lambda request: [*say("ab")[:-1], GenerationFailed("worker_failed", "It died.")]
    call("POST", CHAT, json={"messages": USER, "stream": True})
    page = call("GET", "/metrics").text
    assert metric(page, "twinpool_requests_total", endpoint="chat", outcome="worker_failed") == 1
    assert metric(page, "twinpool_output_tokens_total") == 2
    assert metric(page, "twinpool_inter_token_latency_seconds_count") == 0


def test_what_the_doors_turn_away_counts(backend: Any, tokenizer: Any) -> None:
    """Without a key, and while draining: neither reaches a route."""
    drain = Drain()
    keys = load_keys(None, {KEYS_VARIABLE: "me=a-key-that-is-long-enough"})
    app = create_app(backend, tokenizer, "tiny", door=Door(keys, drain))

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            await client.post(CHAT, json={"messages": USER})
            headers = {"authorization": "Bearer a-key-that-is-long-enough"}
            drain.begin()
            await client.post(CHAT, json={"messages": USER}, headers=headers)
            return (await client.get("/metrics", headers=headers)).text

    page = asyncio.run(ask())
    for code in ("invalid_api_key", "draining"):
        assert metric(page, "twinpool_requests_total", endpoint="chat", outcome=code) == 1
        assert metric(page, REJECTIONS, reason=code) == 1


def test_a_bug_of_ours_counts_once(call: Any, backend: Any, say: Callable[..., Any]) -> None:
    """Before the first token and after it."""
    for number, events in enumerate(([], say("ab")[:1]), start=1):
        backend.script = lambda request, events=events: [*events, ValueError("bug")]
        call("POST", CHAT, json={"messages": USER, "stream": True})
        page = call("GET", "/metrics").text
        assert metric(page, "twinpool_requests_total", endpoint="chat", outcome="internal_error") == number


def test_random_paths_make_no_series(call: Any) -> None:
    """Regression (other servers): each path that somebody tried stayed a series for ever."""
    rng = random.Random(1)
    call("GET", "/first")
    call("PUT", COMPLETIONS)
    before = series(call("GET", "/metrics").text)
    for i in range(1000):
        call("GET", f"/v1/{rng.getrandbits(64):x}/{i}")
    page = call("GET", "/metrics").text
    assert series(page) == before
    assert metric(page, "twinpool_requests_total", endpoint="unmatched", outcome="not_found") == 1001
    assert metric(page, "twinpool_requests_total", endpoint="completions", outcome="method_not_allowed") == 1


def test_what_clients_write_makes_no_series(call: Any) -> None:
    """Neither models, users, request ids nor fields become label values."""
    fields = {"model": "evil-model", "user": "evil-user", "evil-field": 1}
    for body in ({"prompt": "hi", **fields}, {"prompt": "hi", **fields, "model": "tiny"}):
        headers = {"x-request-id": "evil-id", "traceparent": "evil-trace", "authorization": "Bearer evil-key"}
        call("POST", COMPLETIONS, json=body, headers=headers)
    assert "evil" not in call("GET", "/metrics").text


def test_a_worker_that_is_gone_has_no_series(call: Any, backend: Any) -> None:
    """Regression (other routers): gauges of dead workers stayed at their last value."""
    load = Load(num_blocks=100, num_free_blocks=60, num_dropped_frames=2)
    backend.status = lambda: status_of({"prompt-0": load, "completion-0": load, "completion-1": None})
    page = call("GET", "/metrics").text
    assert metric(page, "twinpool_worker_free_blocks", worker="completion-0", role="COMPLETION") == 60
    assert metric(page, "twinpool_worker_dropped_frames_total", worker="completion-0") == 2
    assert metric(page, "twinpool_worker_free_blocks", worker="completion-1") is None
    assert metric(page, "twinpool_workers", role="COMPLETION", state="alive") == 2
    backend.status = lambda: status_of({"prompt-0": load})
    page = call("GET", "/metrics").text
    assert "completion-0" not in page
    assert metric(page, "twinpool_workers", role="COMPLETION", state="alive") == 0


def test_shares_are_fractions(call: Any, backend: Any) -> None:
    """Regression (a gateway): averages were divided as integers."""
    loads = {
        "prompt-0": Load(num_blocks=3, num_free_blocks=2),
        "completion-0": Load(num_blocks=30, num_free_blocks=10, num_cached_blocks=10),
        "completion-1": Load(num_blocks=10, num_free_blocks=9),
    }
    backend.status = lambda: status_of(loads)
    page = call("GET", "/metrics").text
    assert metric(page, "twinpool_kv_usage_ratio", role="PROMPT") == pytest.approx(1 / 3)
    assert metric(page, "twinpool_kv_usage_ratio", role="COMPLETION") == pytest.approx(11 / 40)
    assert metric(page, "vllm:kv_cache_usage_perc", model_name="tiny") == pytest.approx(11 / 40)
    assert metric(page, "vllm:num_requests_waiting", model_name="tiny") == 3
    assert metric(page, "vllm:num_requests_running", model_name="tiny") == 2


def test_the_page_asks_the_router_once_however_many_workers_there_are(call: Any, backend: Any) -> None:
    """1,000 workers: one look at the status, every worker with its series, nothing twice."""
    calls: list[int] = []
    load = Load(num_blocks=10, num_free_blocks=5)

    def status() -> dict[str, Any]:
        calls.append(1)
        return status_of({f"{role}-{i}": load for role in ("prompt", "completion") for i in range(500)})

    backend.status = status
    page = call("GET", "/metrics").text
    assert len(calls) == 1
    assert sum(1 for name, _ in series(page) if name == "twinpool_worker_free_blocks") == 1000


def test_the_page_of_an_empty_cluster(call: Any, backend: Any) -> None:
    """No worker, nothing measured: every family is there, and no value is NaN."""
    backend.status = lambda: status_of({})
    page = call("GET", "/metrics").text
    values = [s.value for family in families(page) for s in family.samples]
    assert values
    assert not any(math.isnan(value) for value in values)


def test_names_and_headers(call: Any) -> None:
    """Our prefix, and the three names that gateways look for; Prometheus's content type; HEAD works."""
    response = call("GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    foreign = {f.name for f in families(response.text) if not f.name.startswith("twinpool_")}
    assert foreign == {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}
    head = call("HEAD", "/metrics")
    assert (head.status_code, head.headers["content-type"]) == (200, response.headers["content-type"])


def test_open_streams_count_until_their_end(
    server_url: str, backend: Any, new_gate: Any, say: Callable[..., Any]
) -> None:
    """Regression (another router): a stream counted as served when its headers were out. 8 open: 8, then 0."""
    gates: list[Any] = []

    def script(request: Any) -> list[Any]:
        gates.append(new_gate())
        events = say("abc")
        return [*events[:1], gates[-1], *events[1:]]

    backend.script = script

    def num_running() -> float | None:
        return metric(httpx.get(f"{server_url}/metrics").text, "twinpool_running_requests", mode="stream")

    body = json.dumps({"messages": USER, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server_url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection((host, int(port)), WAIT_S)) for _ in range(8)]
        for connection in sockets:
            connection.sendall(head.encode() + body)
            answer = b""
            while b'"content":"a"' not in answer:
                answer += connection.recv(65536)
        assert num_running() == 8
        for gate in gates:
            gate.open()
        for connection in sockets:
            answer = b""
            while b"[DONE]" not in answer:
                answer += connection.recv(65536)
        deadline_s = time.monotonic() + WAIT_S
        while num_running() != 0:
            assert time.monotonic() < deadline_s
