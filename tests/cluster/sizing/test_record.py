"""The load generator: open loop, exact token counts and times, and honest about itself; what it saw survives a file."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from twinpool.cluster.protocol.errors import ConfigError, LaunchError
from twinpool.cluster.sizing.probing import ProbedWorker
from twinpool.cluster.sizing.record import Target, record_run, request_body
from twinpool.cluster.sizing.recording import LiveRun, Sighting, join_runs, load_recording
from twinpool.cluster.sizing.workload import Request

TIMING = {
    "queue_s": 0.01, "grant_s": 0.02, "prefill_queue_s": 0.03, "prefill_s": 0.4, "return_s": 0.1, "ttft_s": 0.56,
    "num_prompt_tokens": 8, "num_output_tokens": 3, "num_cached_tokens": 0, "num_attempts": 1, "num_preemptions": 1,
    "num_kv_bytes": 100, "num_kv_bytes_arrived": 100, "last_kv_s": 0.005, "second_token_s": 0.1, "end_s": 0.9,
    "kv_share_hidden": None,
}  # fmt: skip
WORKER = ProbedWorker("prompt-0", "PROMPT", "here", "m", "f", "bfloat16", "fake", 1000, 64, 32, 4096, 2048, 16)
DONE = b"data: [DONE]\n\n"


def event(*token_ids: int, **more: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'token_ids': token_ids}], **more})}\n\n".encode()


class Endpoint:
    """Answers every completion with `pieces`, each sent on its own, once `num_together` of them have arrived."""

    def __init__(self, url: str, pieces: list[bytes], status: int, num_together: int) -> None:
        self.url = url
        self.pieces = pieces
        self.status = status
        self.bodies: list[dict[str, Any]] = []
        self.gate = threading.Barrier(num_together)


@contextmanager
def endpoint(*pieces: bytes, status: int = 200, num_together: int = 1) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            return

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            served.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            served.gate.wait(10)
            self.send_response(served.status)
            self.end_headers()
            for piece in served.pieces:
                self.wfile.write(piece)
                self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Endpoint(f"http://127.0.0.1:{server.server_address[1]}", list(pieces), status, num_together)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def requests(count: int, num_prompt_tokens: int = 8, num_output_tokens: int = 3) -> list[Request]:
    return [Request(f"r{i}", i * 0.001, num_prompt_tokens, num_output_tokens) for i in range(count)]


def run_against(served: Endpoint, arrivals: list[Request]) -> LiveRun:
    return record_run(Target(served.url, "m"), arrivals, max_late_s=10.0)


def test_no_request_waits_for_an_answer_to_another() -> None:
    """The endpoint answers nobody before all eight have arrived: a closed loop would wait for ever."""
    with endpoint(event(1, 2, 3), DONE, num_together=8) as served:
        run = run_against(served, requests(8))
    assert [len(seen.token_times_s) for seen in run.sightings] == [3] * 8
    assert run.max_late_s > 0
    assert run.client_cpu_share > 0


def test_tokens_are_counted_by_their_ids_and_share_the_time_of_their_chunk() -> None:
    """Text says nothing about tokens; events may be cut anywhere, or be comments; the timing is the cluster's."""
    last = event(8, timing=TIMING)
    with endpoint(b": keep-alive\n\n", event(5), event(6, 7), last[:9], last[9:], event(), DONE) as served:
        seen = run_against(served, requests(1)).sightings[0]
    assert seen.error is None
    assert len(seen.token_times_s) == 4
    assert seen.token_times_s[1] == seen.token_times_s[2]
    assert list(seen.token_times_s) == sorted(seen.token_times_s)
    assert seen.sent_s < seen.token_times_s[0]
    assert seen.timing == TIMING


@pytest.mark.parametrize(
    ("status", "pieces", "words"),
    [
        (429, [b'{"error": {"message": "queue is full"}}'], "status 429: .*queue is full"),
        (200, [event(1)], r"before \[DONE\]"),
        (200, [event(1), b'data: {"error": {"message": "worker failed"}}\n\n', DONE], "worker failed"),
    ],
)
def test_a_lost_request_is_kept_with_its_reason(status: int, pieces: list[bytes], words: str) -> None:
    with endpoint(*pieces, status=status) as served:
        seen = run_against(served, requests(1)).sightings[0]
    assert re.search(words, seen.error or "")


def test_prompts_have_their_length_share_no_prefix_and_come_from_the_seed() -> None:
    target = Target("http://unused", "m", seed=1)
    bodies = [json.loads(request_body(target, request)) for request in requests(200, num_prompt_tokens=64)]
    assert {len(body["prompt"]) for body in bodies} == {64}
    assert len({tuple(body["prompt"][:16]) for body in bodies}) == 200
    assert all(body["max_tokens"] == body["min_tokens"] == 3 and body["ignore_eos"] for body in bodies)
    first = requests(1)[0]
    assert request_body(target, first) == request_body(target, first)
    assert request_body(target, first) != request_body(Target("http://unused", "m", seed=2), first)


def test_a_generator_that_falls_behind_refuses_its_own_run() -> None:
    with endpoint(event(1, 2, 3), DONE) as served, pytest.raises(LaunchError, match="behind its arrivals"):
        record_run(Target(served.url, "m"), requests(1), max_late_s=0.0)


def test_arrivals_out_of_order_and_a_silent_endpoint_are_refused() -> None:
    with pytest.raises(ConfigError, match="sorted"):
        record_run(Target("http://127.0.0.1:9", "m"), requests(2)[::-1])
    with pytest.raises(LaunchError, match=r"nobody answers at http://127.0.0.1:9"):
        record_run(Target("http://127.0.0.1:9", "m"), requests(1))


def recorded_run() -> LiveRun:
    good = Sighting(sent_s=1.0, token_times_s=(1.56, 1.60, 1.70), timing=TIMING)
    lost = Sighting(sent_s=2.0, token_times_s=(2.5,), error="it broke")
    return LiveRun([good, lost], client_cpu_share=0.1, max_late_s=0.001)


def test_a_live_run_is_described_as_a_simulated_one_is() -> None:
    recording = join_runs([WORKER], requests(2), [recorded_run()])
    run = recording.as_run(0)
    done, lost = run.outcomes
    assert (done.request.arrival_s, done.ttft_s, done.e2e_s) == (1.0, pytest.approx(0.56), pytest.approx(0.70))
    assert done.tpot_s == pytest.approx(0.07)
    assert done.max_gap_s == pytest.approx(0.10)
    assert done.prefill_start_s == pytest.approx(1.06)
    assert done.prefill_end_s == pytest.approx(1.46)
    assert done.transfer_end_s == pytest.approx(1.565)
    assert (done.num_preemptions, done.is_finished, done.refused) == (1, True, None)
    assert (lost.is_finished, lost.refused, lost.num_tokens) == (False, "it broke", 1)
    assert run.gaps == {0.04: 1, 0.1: 1}
    assert run.end_s == 2.5


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    recording = join_runs([WORKER], requests(2), [recorded_run(), recorded_run()])
    recording.save(tmp_path / "run.jsonl")
    assert load_recording(tmp_path / "run.jsonl") == recording


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (1, {"format": "twinpool-recording/9"}, r":1 is not a recording's header: format"),
        (2, {"arrival_s": "soon"}, r":2 is not a recording's recordedrequest: arrival_s"),
        (3, {"surprise": 1}, r":3 .*: surprise"),
        (3, {"runs": [{"sent_s": 1.0}, {"sent_s": 2.0}]}, r":3: runs: 2 instead of the header's 1"),
    ],
)
def test_a_damaged_recording_is_refused_by_line_and_key(
    tmp_path: Path, number: int, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "run.jsonl"
    join_runs([WORKER], requests(2), [recorded_run()]).save(path)
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps({**json.loads(lines[number - 1]), **change})
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=words):
        load_recording(path)


def test_a_missing_or_empty_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_recording(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds no recording"):
        load_recording(tmp_path / "empty.jsonl")
