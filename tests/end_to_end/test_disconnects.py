"""Clients that leave, stall or wait, and workers that die under a stream: nothing is kept, nobody is left hanging."""

import json
import random
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from live_cluster import LiveCluster, events_in, is_idle, open_stream, open_things, read_events, wait_until
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260
NUM_BLOCKS, BLOCK_SIZE = 64, 32
FIELDS: dict[str, Any] = {"ignore_eos": True, "seed": 1, "stream": True, "return_token_ids": True}
QUICK = {"heartbeat_s": 0.05}  # so that the router's view of its workers is that old at most
LONG_PROMPT = [7] * 4000  # 250 chunks of the slow PROMPT worker: it would compute for 50 s


def pool(**engine: Any) -> dict[str, Any]:
    return {"engine": {"kind": "fake", "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, **engine}}


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path) -> Iterator[LiveCluster]:
    """One fake worker a pool."""
    completion = pool(fake_seconds_per_row=0.0005)
    with LiveCluster(tiny_llama, {"prompt": pool(), "completion": completion, "liveness": QUICK}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slow_prefill(tiny_llama: Path) -> Iterator[LiveCluster]:
    """Prompts take 0.2 s for 16 tokens; the router notices and says soon that a worker is dead."""
    spec = {
        "prompt": pool(num_blocks=256, max_num_batched_tokens=16, fake_seconds_per_row=0.2),
        "completion": pool(num_blocks=256, fake_seconds_per_row=0.02),
        "router": {"keep_alive_s": 0.1, "no_worker_grace_s": 0.5},
        "liveness": {"heartbeat_s": 0.05, "suspect_after_s": 1.0, "gone_after_s": 1.5},
    }
    with LiveCluster(tiny_llama, spec) as cluster:
        yield cluster


def send(cluster: LiveCluster, prompt: list[int], max_tokens: int, receive_bytes: int | None = None) -> socket.socket:
    """Send a streamed completion; return the connection without reading from it."""
    return open_stream(cluster, receive_bytes, prompt=prompt, max_tokens=max_tokens, **FIELDS)


def has_stopped(cluster: LiveCluster) -> bool:
    return is_idle(cluster.status())


def check_capacity(cluster: LiveCluster) -> None:
    """As many requests as the blocks hold at once, each with its only right answer."""
    num_tokens = 3 * BLOCK_SIZE
    prompts = [[9 + number, *range(4, 4 + BLOCK_SIZE - 1)] for number in range(NUM_BLOCKS // 4)]

    def ask(prompt: list[int]) -> list[int]:
        fields = {**FIELDS, "stream": False, "max_tokens": num_tokens}
        return cluster.complete(prompt, **fields)["choices"][0]["token_ids"]

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, prompts))
    assert answers == [expected_tokens(prompt, num_tokens, VOCAB_SIZE, seed=1) for prompt in prompts]


def leave_at_the_hand_off(cluster: LiveCluster, number: int) -> None:
    """Hang up once the PROMPT worker's token is there, while the COMPLETION worker takes over."""
    with send(cluster, [4 + number % 250] * 100, 50) as connection:
        data = b""
        while b"data: " not in data:
            data += connection.recv(65536)


def leave_at_random(cluster: LiveCluster, number: int) -> None:
    """Hang up after 0 to 200 ms, wherever the request is then."""
    with send(cluster, [4 + number % 250] * 100, 50):
        time.sleep(random.Random(number).uniform(0.0, 0.2))


@pytest.mark.parametrize(
    ("leave", "count"),
    [
        (leave_at_the_hand_off, 24),
        pytest.param(leave_at_the_hand_off, 500, marks=pytest.mark.slow),
        (leave_at_random, 500),
    ],
)
def test_clients_that_leave_cost_no_capacity_and_disturb_nobody(cluster: LiveCluster, leave: Any, count: int) -> None:
    """Others are answered right meanwhile, and afterwards every block is there."""
    prompt = list(range(4, 50))
    with ThreadPoolExecutor(32) as threads:
        leaving = [threads.submit(leave, cluster, number) for number in range(count)]
        chunks = list(cluster.stream(prompt, max_tokens=100, **{k: v for k, v in FIELDS.items() if k != "stream"}))
        for future in leaving:
            future.result(timeout=60)
    token_ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert token_ids == expected_tokens(prompt, 100, VOCAB_SIZE, seed=1)
    cluster.wait_idle()
    check_capacity(cluster)


def stops_after_s(cluster: LiveCluster, leave: Callable[[], None]) -> float:
    """Let a client leave; return the time from when the router knows to when no worker has anything of it."""
    wait_until(lambda: cluster.status()["running"] == 1 and not has_stopped(cluster), 20, "a worker that computes")
    leave()
    wait_until(lambda: cluster.status()["running"] == 0, 10, "the departure noticed")
    noticed_s = time.monotonic()
    wait_until(lambda: has_stopped(cluster), 10, "the work stopped")
    return time.monotonic() - noticed_s


@pytest.mark.parametrize(("prompt", "step_s"), [(LONG_PROMPT, 0.2), ([5, 6, 7], 0.02)], ids=["prefill", "decode"])
@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_work_stops_within_a_step_of_a_departure(
    slow_prefill: LiveCluster, prompt: list[int], step_s: float, count: int
) -> None:
    """200 ms and the step that runs, as the heartbeats tell it: at best; and not much more when the machine is busy."""
    took_s: list[float] = []
    for number in range(count):
        with send(slow_prefill, [4 + number, *prompt], 90) as connection:
            took_s.append(stops_after_s(slow_prefill, connection.close))
    assert min(took_s) <= 0.2 + step_s
    assert statistics.median(took_s) <= 1.0


@pytest.mark.parametrize("num_rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_two_hundred_clients_that_leave_at_once_leave_nothing(cluster: LiveCluster, num_rounds: int) -> None:
    """Some run, most wait: no block, thread, descriptor or queue entry stays; the next request is served."""
    check_capacity(cluster)
    cluster.wait_idle()
    num_done = completed_and_not(cluster)  # starts a thread of the router, as the first metrics page does
    before = open_things(cluster)
    for _ in range(num_rounds):
        connections = [send(cluster, [4 + number % 250] * 100, 500) for number in range(200)]
        wait_until(lambda: waits_or_runs(cluster) == 200, 30, "all requests there")
        for connection in connections:
            connection.close()
        wait_until(lambda: waits_or_runs(cluster) == 0, 30, "all requests gone")
        assert cluster.complete([5, 6, 7], max_tokens=5)["choices"]
    cluster.wait_idle()
    assert completed_and_not(cluster) - num_done == 201 * num_rounds, "each request has one end in the metrics"
    check_capacity(cluster)
    for name, (threads, descriptors, children) in open_things(cluster).items():
        assert threads <= before[name][0], name
        assert descriptors <= before[name][1] + 2, name
        assert children == 0, name


def waits_or_runs(cluster: LiveCluster) -> int:
    status = cluster.status()
    return status["queued"] + status["running"]


def completed_and_not(cluster: LiveCluster) -> int:
    """Return how many requests have ended in any way, by the router's own count."""
    page = cluster.client.get("/metrics").text
    return sum(float(value) for value in re.findall(r"^twinpool_requests_total{.*} (\S+)$", page, re.MULTILINE))


def test_a_client_that_leaves_during_prefill_stops_it(slow_prefill: LiveCluster) -> None:
    """Closed before the first byte: both workers are idle long before the prompt could have been computed."""
    with send(slow_prefill, LONG_PROMPT, 5):
        wait_until(lambda: slow_prefill.status()["running"], 10, "a request that runs")
        wait_until(lambda: not has_stopped(slow_prefill), 10, "a worker that computes")
    slow_prefill.wait_idle(5)


def test_silence_is_filled_for_the_openai_client(slow_prefill: LiveCluster) -> None:
    """A prefill of many keep-alive periods: the official client sees chunks alone, a raw reader data and comments."""
    prompt = LONG_PROMPT[:60]
    with openai.OpenAI(base_url=f"{slow_prefill.url}/v1", api_key="-", max_retries=0, timeout=30) as client:
        stream = client.completions.create(
            model=slow_prefill.model, prompt=prompt, max_tokens=3, seed=1, stream=True, extra_body={"ignore_eos": True}
        )
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    with send(slow_prefill, prompt, 3) as connection:
        data = b""
        while b"data: [DONE]\n\n" not in data:
            data += connection.recv(65536)
    lines = [line for line in data.partition(b"\r\n\r\n")[2].split(b"\n") if line.startswith((b":", b"data:"))]
    assert lines.count(b": keep-alive") >= 3
    assert not [line for line in data.split(b"\n") if line.startswith((b"id:", b"event:", b"retry:"))]


@pytest.mark.parametrize(("victim", "stream"), [("prompt-0", True), ("completion-0", False)])
def test_a_pool_that_dies_during_prefill_ends_the_request(slow_prefill: LiveCluster, victim: str, stream: bool) -> None:
    """Nobody is left to try: an error in seconds, and the other side keeps nothing of it."""
    with ThreadPoolExecutor(1) as threads:
        body = {"prompt": LONG_PROMPT, "stream": stream}
        future = threads.submit(slow_prefill.client.post, "/v1/completions", json=body)
        wait_until(lambda: slow_prefill.status()["running"], 10, "a request that runs")
        wait_until(lambda: not has_stopped(slow_prefill), 10, "a worker that computes")
        slow_prefill.kill(victim)
        response = future.result(timeout=20)
    if stream:  # open already, for the keep-alives
        *_, error, done = [line for line in response.text.split("\n") if line.startswith("data: ")]
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "no_worker"
    else:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_worker"
    wait_until(lambda: has_stopped(slow_prefill), 10, "the other worker at rest")
    slow_prefill.start(victim)
    slow_prefill.wait_ready()


def test_a_completion_pool_that_dies_in_mid_stream_ends_it_well_formed(slow_prefill: LiveCluster) -> None:
    """At the tenth token: an error event, [DONE], the end of the body, and no finish reason."""
    with send(slow_prefill, [5, 6, 7], 2000) as connection:
        data = read_events(connection, 10)
        slow_prefill.kill("completion-0")
        *chunks, error, done = events_in(read_events(connection, data=data))
    assert done == b"[DONE]"
    assert json.loads(error)["error"]["code"] == "no_worker"
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    slow_prefill.start("completion-0")
    slow_prefill.wait_ready()


def resident_bytes(cluster: LiveCluster) -> int:
    fields = Path(f"/proc/{cluster.processes['router'].pid}/status").read_text().split()
    return int(fields[fields.index("VmRSS:") + 1]) * 1024


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_clients_that_never_read_are_cut_off(tiny_llama: Path, count: int) -> None:
    """Their requests end, their blocks are free, the router's memory stays bounded; a reader beside them is served."""
    spec = {
        "served_model_name": "m" * 512,  # every chunk names it, so that few of them fill the buffers
        "prompt": pool(num_blocks=256),
        "completion": pool(num_blocks=7000, max_num_seqs=64, fake_seconds_per_row=0.0005),
        "router": {"slow_reader_s": 1.0},
    }
    with LiveCluster(tiny_llama, spec) as cluster:
        cluster.complete([5, 6], max_tokens=5)
        before_bytes = resident_bytes(cluster)
        connections = [send(cluster, [4 + i, 5, 6], 4000, receive_bytes=4096) for i in range(count)]
        wait_until(lambda: cluster.status()["running"] == count, 20, "all streams run")
        *_, last = cluster.stream([5, 6], max_tokens=5, ignore_eos=True)
        assert last["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: cluster.status()["running"] == 0, 40, "all streams cut off")
        cluster.wait_idle()
        assert resident_bytes(cluster) - before_bytes < count * 500_000
        log = (cluster.folder / "router.log").read_text()
        assert log.count("has read nothing for") == count
        for connection in connections:
            with connection:
                assert b"[DONE]" not in read_what_is_left(connection)


def read_what_is_left(connection: socket.socket) -> bytes:
    data = b""
    try:
        while received := connection.recv(65536):
            data += received
    except ConnectionResetError:
        pass
    return data
