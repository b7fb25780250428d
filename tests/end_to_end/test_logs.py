"""Logs tell of every request, one JSON object a line, and never what was asked, answered, or the key it came with."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_cluster import LiveCluster
from twinpool.cluster.commands.chat import Question, ask_question
from twinpool.cluster.protocol.errors import LaunchError

KEY = "sk-log-0123456789abcdef"
SECRET = "zanzibar-heliotrope"
THREE = {"max_tokens": 3, "ignore_eos": True}  # and a seed of the router's choice
FAKE = {"engine": {"kind": "fake", "num_blocks": 64}}


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """One fake worker a pool, logs in JSON, and a key."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice:{KEY}")
    file.chmod(0o600)
    router = {"api_keys_file": str(file)}
    cluster = LiveCluster(tiny_llama, {"prompt": FAKE, "completion": FAKE, "router": router, "log_format": "json"})
    cluster.client.headers["authorization"] = f"Bearer {KEY}"
    with cluster:
        yield cluster


@pytest.fixture
def logged(cluster: LiveCluster) -> Callable[[], dict[str, str]]:
    """Return what a call of it returns: the logs since the test began, by process."""
    before = {path: path.stat().st_size for path in cluster.folder.glob("*.log")}
    return lambda: {path.stem: path.read_bytes()[size:].decode() for path, size in before.items()}


def parsed(text: str, worker: str) -> list[dict[str, Any]]:
    """Every line is one JSON object with the fields of a log line, and holds no character that is not printable."""
    *lines, rest = text.split("\n")
    assert rest == ""
    assert all(line.isprintable() for line in lines)
    objects: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for line in objects:
        assert {"ts", "level", "logger", "worker", "message"} <= set(line)
        assert line["worker"] == worker
    return objects


def test_every_request_is_logged_and_no_text(
    cluster: LiveCluster, logged: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good requests, refused ones, broken bodies and wrong keys; in the log of every role."""
    model, client = cluster.model, cluster.client
    message = {"role": "user", "content": SECRET}
    good = client.post("/v1/chat/completions", json={"model": model, "messages": [message], **THREE})
    assert good.status_code == 200, good.text
    streamed = {"model": model, "prompt": [SECRET], "stream": True, "stop": [SECRET], **THREE}
    assert client.post("/v1/completions", json=streamed).status_code == 200
    refused: list[dict[str, Any]] = [
        {"json": {"model": SECRET, "prompt": SECRET}},
        {"json": {"model": model, "prompt": SECRET, "temperature": SECRET}},
        {"json": {"model": model, "prompt": SECRET * 1000}},
        {"json": {"model": model, "prompt": SECRET, "logit_bias": {SECRET: 1}}},
        {"content": f'{{"prompt": "{SECRET}', "headers": {"content-type": "application/json"}},
        {"content": SECRET.encode()},
    ]
    for arguments in refused:
        assert 400 <= client.post("/v1/completions", **arguments).status_code < 500
    assert client.get(f"/v1/models/{SECRET}").status_code == 404
    wrong = httpx.get(f"{cluster.url}/v1/models", headers={"authorization": f"Bearer {SECRET}{KEY}"})
    assert wrong.status_code == 401
    with pytest.raises(LaunchError, match="hint: set TWINPOOL_API_KEY"):
        ask_question(cluster.url, model, Question(SECRET, max_tokens=2), lambda piece: None)
    monkeypatch.setenv("TWINPOOL_API_KEY", KEY)
    asked = ask_question(cluster.url, model, Question(SECRET, max_tokens=3, wants_timing=True), lambda piece: None)
    assert asked.timing is not None
    cluster.wait_idle()
    logs = logged()
    assert set(logs) == {"router", "prompt-0", "completion-0"}
    assert SECRET not in "".join(logs.values())
    assert KEY not in "".join(logs.values())
    lines = {name: parsed(text, name) for name, text in logs.items()}
    ended = [line for line in lines["router"] if "outcome" in line]
    assert [(line["endpoint"], line["outcome"], line["caller"]) for line in ended] == [
        ("chat", "finished", "alice"),
        ("completions", "finished", "alice"),
        ("chat", "finished", "alice"),
    ]
    assert ended[0]["request_id"] in good.json()["id"]
    assert [line["num_output_tokens"] for line in ended] == [3, 3, asked.timing["num_output_tokens"]]
    assert all(0 < line["ttft_s"] <= line["duration_s"] for line in ended)
    num_refused = sum(line.get("status", 0) >= 400 for line in lines["router"])
    assert num_refused == len(refused) + 1


HOSTILE = "\x1b[31mred\x1b[0m\r\nERROR forged: line\x00\x07\x85\u2028\u202e"
ENCODED = "%1b%5b31m%0d%0aERROR%20forged%00%c2%85"


def hostile_requests(model: str) -> list[bytes]:
    """Control characters wherever a client can put them: path, query, headers, names, ids; some are no HTTP at all."""
    raw = HOSTILE.encode()
    names = [b"X-Request-Id", b"Traceparent", b"User-Agent", b"X-Request-Timeout-Ms", b"Host", b"Content-Type"]
    key = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
    end = b"Connection: close\r\n\r\n"
    requests = [b"GET /" + path + b" HTTP/1.1\r\nHost: x\r\n" + key + end for path in (raw, ENCODED.encode())]
    requests += [f"GET /v1/models/{ENCODED}?{ENCODED}={SECRET} HTTP/1.1\r\nHost: x\r\n".encode() + key + end]
    requests += [raw + b" / HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1" + raw + b"\r\n\r\n"]
    for name in names:
        for value in (raw, b"\x1b[31m" + SECRET.encode(), b"a\tb", b"\xff\xfe", b"x" * 5000):
            requests.append(b"GET /v1/models HTTP/1.1\r\n" + name + b": " + value + b"\r\n" + key + end)
    for scheme in (b"Bearer ", b"Basic "):
        for given in (b"\x1b[31m" + KEY.encode(), KEY.encode() + b"\xe9\x85"):
            value = b"Authorization: " + scheme + given + b"\r\n"
            requests.append(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + value + end)
    good = {"model": model, "prompt": SECRET, **THREE}
    for fields in ({"model": HOSTILE}, {"user": HOSTILE}, {"prompt": HOSTILE}, {"stop": HOSTILE}, {HOSTILE: HOSTILE}):
        body = json.dumps({**good, **fields}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        requests.append(head + key + b"Content-Length: %d\r\n" % len(body) + end + body)
    return requests


def test_control_characters_make_no_lines(cluster: LiveCluster, logged: Callable[[], dict[str, str]]) -> None:
    """Each line stays one JSON object; neither a key nor a prompt is in any of them, at the level INFO."""
    statuses: list[int] = []
    for request in hostile_requests(cluster.model):
        with socket.create_connection(("127.0.0.1", int(cluster.url.rpartition(":")[2])), timeout=30) as connection:
            connection.sendall(request)
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
        assert received.startswith(b"HTTP/1.1 "), request
        assert received.count(b"HTTP/1.1 ") == 1, request
        statuses.append(int(received.split()[1]))
    assert set(statuses) == {200, 400, 401, 404}
    cluster.wait_idle()
    logs = logged()
    lines = [line for name, text in logs.items() for line in parsed(text, name)]
    assert sum("outcome" in line for line in lines) >= 4
    assert not [line for line in lines if line["level"] not in ("INFO", "WARNING")]
    for secret in (SECRET, KEY, "forged"):
        assert secret not in "".join(logs.values())
