"""The page is complete, closed to everything from elsewhere, and tells no secret."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import twinpool

PAGE = Path(twinpool.__file__).parent / "router" / "page"
NAMES = sorted(file.name for file in PAGE.iterdir())
Call = Callable[..., httpx.Response]


def test_every_file_is_served_and_nothing_else(call: Call) -> None:
    """With a media type that browsers insist on for modules, and never from a stale cache."""
    for name in NAMES:
        response = call("GET", "/" if name == "index.html" else f"/page/{name}")
        assert response.status_code == 200
        assert response.content == (PAGE / name).read_bytes()
        assert response.headers["cache-control"] == "no-cache"
        if name.endswith(".js"):
            assert response.headers["content-type"].startswith("text/javascript")
    for path in ("/page/", "/page/index.html", "/page/%2e%2e/app.py", "/page/..%2fapp.py"):
        assert call("GET", path).status_code == 404
    assert call("HEAD", "/").status_code == 200


def test_the_page_may_load_and_send_nothing_elsewhere(call: Call) -> None:
    """The policy allows this origin alone, and no file needs more: no inline script or style, no address of others."""
    policy = call("GET", "/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", html)
    for name in NAMES:
        text = (PAGE / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|\beval\b|document\.write", text), name


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith((".html", ".js"))])
def test_the_files_that_a_file_needs_are_there(name: str) -> None:
    needed = re.findall(r'(?:src|href)="page/([^"]+)"|from "\./([^"]+)"', (PAGE / name).read_text())
    assert {a or b for a, b in needed} <= set(NAMES)


def test_the_cluster_as_the_page_sees_it(call: Call, backend: Any) -> None:
    """Both pools, whoever has reported; the latencies of what was asked."""
    call("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 4})
    response = call("GET", "/cluster")
    assert response.headers["cache-control"] == "no-store"
    cluster = response.json()
    assert (cluster["model"], cluster["state"], cluster["queued"]) == ("tiny", "ready", 7)
    assert [(pool["role"], [w["name"] for w in pool["workers"]]) for pool in cluster["pools"]] == [
        ("PROMPT", ["prompt-0"]),
        ("COMPLETION", ["completion-0", "completion-1"]),
    ]
    assert cluster["pools"][0]["workers"][0]["num_free_blocks"] == 60
    assert cluster["pools"][1]["workers"][1] == {
        "name": "completion-1",
        "state": "suspect",
        "num_blocks": None,
        "num_free_blocks": None,
        "num_cached_blocks": None,
        "num_queued_tokens": None,
        "num_sequences": None,
    }
    assert cluster["latency"]["ttft"]["count"] == 1
    backend.is_ready = False
    assert call("GET", "/cluster").json()["state"] == "not_ready"


def test_the_page_learns_no_secret(call: Call, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator's status says of processes, hosts and incidents stays with the operator."""
    status = backend.status()
    for worker in status["workers"]:
        worker |= {"pid": 4711, "host": "secret-host", "incarnation": "secret-run"}
    status["incidents"] = [{"what": "secret-incident"}]
    monkeypatch.setattr(backend, "status", lambda: status)
    text = json.dumps(call("GET", "/cluster").json())
    assert "secret" not in text
    assert "4711" not in text
