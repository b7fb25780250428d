"""A stand-in for the router: readiness, the admin socket, and a chat completion that echoes, with a timeline."""

import json
import signal
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from twinpool.cluster.launch.stop_request import StopRequest
from twinpool.cluster.role import RoleArguments, parse_role_arguments

given: RoleArguments = parse_role_arguments("router")
TIMING = {
    "queue_s": 0.001, "grant_s": 0.002, "prefill_queue_s": 0.003, "prefill_s": 0.04, "return_s": 0.001,
    "num_prompt_tokens": 12, "num_output_tokens": 2, "num_cached_tokens": 0, "num_attempts": 2, "num_preemptions": 1,
    "num_kv_bytes": 1000, "num_kv_bytes_arrived": 960, "last_kv_s": -0.001, "second_token_s": 0.016, "end_s": 0.063,
    "ttft_s": 0.047, "kv_share_hidden": 0.96,
}  # fmt: skip


LOAD = {
    "num_blocks": 100, "num_free_blocks": 97, "num_cached_blocks": 0, "num_granted_blocks": 0, "num_queued_tokens": 0,
    "num_sequences": 3, "num_transfers": 0, "num_preemptions": 0, "num_dropped_frames": 0,
}  # fmt: skip
WORKER = {
    "state": "alive", "incarnation": "a1", "load": LOAD, "since_s": 1.0, "last_heartbeat_s": 0.1,
    "last_progress_s": 0.1, "fingerprint": "f1", "dtype": "float32", "block_size": 32, "num_blocks": 100,
    "max_model_len": 512,
}  # fmt: skip
STARTED_S = time.monotonic()


def workers() -> list[dict[str, Any]]:
    """Whoever left its file in the run folder and is still alive."""
    found = [json.loads(path.read_text()) for path in given.run_folder.glob("*.here")]
    return [{**row, **WORKER} for row in found if Path(f"/proc/{row['pid']}/stat").exists()]


def status() -> dict[str, Any]:
    """What the real one answers, as far as `twinpool` reads it; a file `says` in the run folder changes it."""
    told = given.run_folder / "says"
    changes = json.loads(told.read_text()) if told.exists() else {}
    return {
        "ready": is_ready(), "incarnation": "r1", "uptime_s": time.monotonic() - STARTED_S, "queued": 0, "running": 3,
        "malformed_messages": 0, "loop_lag_s": 0.0, "workers": workers(),
        "incidents": [{"at_s_ago": 4.0, "worker": "prompt-0", "what": "joined"}],
        **changes,
    }  # fmt: skip


def is_ready() -> bool:
    return {row["role"] for row in workers()} == {"PROMPT", "COMPLETION"}


class Handler(BaseHTTPRequestHandler):
    def address_string(self) -> str:
        return "client"

    def log_message(self, format: str, *args: Any) -> None:
        return

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/status":
            self.answer(200, status())
        elif self.path == "/health/live":
            self.answer(200, {})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if request["messages"][-1]["content"] == "fail":
            self.answer(400, {"error": {"message": "this prompt is refused", "type": "invalid_request_error"}})
            return
        self.send_response(200)
        self.end_headers()
        for piece in ("You said: ", request["messages"][-1]["content"]):
            self.event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        self.event({"choices": [], **({"timing": TIMING} if request.get("timing") else {})})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, body: object) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())


class AdminServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


stopped = StopRequest()
num_asked = 0


def asked_to_end(*_: object) -> None:
    """End; with a file `busy` in the run folder only when asked twice, as a router whose requests run."""
    global num_asked
    num_asked += 1
    if num_asked > 1 or not (given.run_folder / "busy").exists():
        stopped.set()


signal.signal(signal.SIGTERM, asked_to_end)
assert given.admin_socket is not None
given.admin_socket.unlink(missing_ok=True)
admin = AdminServer(str(given.admin_socket), Handler)
front = ThreadingHTTPServer((given.spec.router.host, given.spec.router.port), Handler)
for server in (admin, front):
    threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stderr.write(f"router on {given.spec.router.port}\n")
sys.stderr.flush()
while not stopped.wait(0.1):
    pass
