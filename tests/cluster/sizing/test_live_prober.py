"""What the prober makes of the router's answers; a stand-in on a unix socket plays the router."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from twinpool.cluster.protocol.errors import LaunchError
from twinpool.cluster.sizing.live_prober import LiveProber

Reply = Callable[[str, Any], tuple[int, Any]]  # path, body → status, body
BUSY = (409, {"error": {"message": "prompt-0 serves requests", "code": "worker_busy"}})


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    reply: Reply


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        assert isinstance(server, Server)
        status, answer = server.reply(self.path, body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def prober_of(folder: Path, reply: Reply) -> Iterator[LiveProber]:
    with Server(str(folder / "s"), Handler) as server:
        server.reply = reply
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with LiveProber(folder / "s", "http://127.0.0.1:9", "m", limit_s=7.0) as prober:
            yield prober
        server.shutdown()
        thread.join()


def test_a_busy_worker_is_asked_again(tmp_path: Path) -> None:
    answers = [BUSY, BUSY, (200, {"pass_s": [0.5]})]
    asked: list[Any] = []

    def reply(path: str, body: Any) -> tuple[int, Any]:
        asked.append((path, body))
        return answers.pop(0)

    with prober_of(tmp_path, reply) as prober:
        assert prober.time_passes("prompt-0", [(0, 8)], 1, 2) == [0.5]
    question = {"worker": "prompt-0", "rows": [[0, 8]], "num_warmup": 1, "num_repeats": 2, "limit_s": 7.0}
    assert asked == [("/probe/passes", question)] * 3


def test_the_first_transfer_does_not_count(tmp_path: Path) -> None:
    times_s = [9.0, 0.25, 0.5]
    with prober_of(tmp_path, lambda *_: (200, {"transfer_s": times_s.pop(0)})) as prober:
        assert prober.time_transfers("prompt-0", "completion-0", 7, 2) == [0.25, 0.5]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((409, {"error": {"message": "too long", "code": "probe_refused"}}), "too long\nhint: "),
        ((400, {"error": {"message": "rows: wrong", "code": "invalid_value"}}), "rows: wrong"),
        ((502, b"<html>"), "HTTP status 502"),
    ],
)
def test_a_refusal_is_one_clear_error(tmp_path: Path, reply: tuple[int, Any], message: str) -> None:
    asked: list[str] = []
    with (
        prober_of(tmp_path, lambda path, _: (asked.append(path), reply)[1]) as prober,
        pytest.raises(LaunchError) as caught,
    ):
        prober.time_passes("prompt-0", [(0, 8)], 1, 2)
    assert message in str(caught.value)
    assert len(asked) == 1, "only a busy worker is worth another try"


def test_no_router_is_one_clear_error(tmp_path: Path) -> None:
    with LiveProber(tmp_path / "nothing", "http://127.0.0.1:9", "m") as prober:
        for ask in (prober.workers, lambda: prober.time_request(3), lambda: prober.time_transfers("a", "b", 1, 1)):
            with pytest.raises(LaunchError, match="hint: `twinpool status`"):
                ask()
