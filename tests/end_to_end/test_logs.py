"""Logs tell of every request, one JSON object a line, and never what was asked, answered, or the key it came with."""

import json
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


def test_every_request_is_logged_and_no_text(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good requests, refused ones, broken bodies and wrong keys; in the log of every role."""
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}")
    file.chmod(0o600)
    router = {"api_keys_file": str(file)}
    cluster = LiveCluster(tiny_llama, {"prompt": FAKE, "completion": FAKE, "router": router, "log_format": "json"})
    cluster.client.headers["authorization"] = f"Bearer {KEY}"
    with cluster:
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
        logs = {path.stem: path.read_text() for path in cluster.folder.glob("*.log")}
    assert set(logs) == {"router", "prompt-0", "completion-0"}
    assert SECRET not in "".join(logs.values())
    assert KEY not in "".join(logs.values())
    lines = {name: [json.loads(line) for line in text.splitlines()] for name, text in logs.items()}
    for name in logs:
        for line in lines[name]:
            assert {"ts", "level", "logger", "worker", "message"} <= set(line), name
            assert line["worker"] == name
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
