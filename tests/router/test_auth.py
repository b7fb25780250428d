"""Keys are read strictly, never shown, and close every route but the liveness check."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from twinpool.cluster.config import RouterSpec
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.router.app import Door, create_app
from twinpool.router.auth import NO_KEYS, ApiKeys, keys_for, load_keys
from twinpool.router.openai.tokenizer import ChatTokenizer
from twinpool.router.quotas import Quota

ALICE, BOB = "alice-secret-0123456789", "bob-secret-0123456789"
Send = Callable[..., httpx.Response]


def keys_of(tmp_path: Path, text: str, variable: str = "") -> ApiKeys:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    return load_keys(file, {"TWINPOOL_API_KEYS": variable})


def test_every_form_gives_the_same_callers(tmp_path: Path) -> None:
    """A YAML list, plain lines with comments, and the environment; only the list knows weights and quotas."""
    listed = keys_of(
        tmp_path,
        f"- {{name: alice, key: {ALICE}, weight: 2, max_running_requests: 3, tokens_per_minute: 1000}}\n"
        f"- {{name: bob, key: {BOB}}}\n",
    )
    alice = listed.caller_of(ALICE)
    assert alice is not None
    assert (alice.name, alice.weight, alice.quota) == ("alice", 2.0, Quota(3, 1000))
    lines = keys_of(tmp_path, f"# who may ask\nbob : {BOB}\n\n", f"alice={ALICE}")
    for keys in (listed, lines):
        assert (bob := keys.caller_of(BOB)) is not None
        assert (bob.name, bob.weight, bob.quota) == ("bob", 1.0, Quota())
        assert keys.caller_of(BOB + "x") is None
        assert keys.caller_of("") is None
    assert load_keys(None, {}) == NO_KEYS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"alice:{ALICE}\nalice:{BOB}", "two API keys are named 'alice'"),
        (f"alice:{ALICE}\nbob:{ALICE}", "'bob' and 'alice' have the same API key"),
        ("alice:hidden-short", "0.key: String should have at least 16 characters"),
        (f"al ice:{ALICE}", "0.name"),
        (f"{ALICE}", "0"),
        (f"- {{name: alice, key: {ALICE}, {BOB}: 1}}", "0: Extra inputs"),
        (f"- {{name: alice, key: {ALICE}, weight: 0}}", "0.weight"),
        (f"- name: alice\n key: {ALICE}", "is not YAML"),
        ("# nobody\n", "holds no API key"),
    ],
)
def test_wrong_keys_are_refused_without_being_shown(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_of(tmp_path, text)
    assert said in str(caught.value)
    assert all(secret not in str(caught.value) for secret in (ALICE, BOB, "hidden-short"))


def test_a_missing_file_is_named_and_a_readable_one_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the API keys in .*nowhere"):
        load_keys(tmp_path / "nowhere", {})
    file = tmp_path / "keys"
    file.write_text(f"alice:{ALICE}")
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        load_keys(file, {})
    assert "everybody on this machine can read the API keys" in caplog.text
    assert ALICE not in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_beyond_loopback_only_with_keys(host: str) -> None:
    with pytest.raises(ConfigError, match="is not loopback") as caught:
        keys_for(RouterSpec(host=host), {"TWINPOOL_API_KEYS": " "})
    assert "hint: other machines may connect only with API keys" in str(caught.value)
    assert keys_for(RouterSpec(host=host), {"TWINPOOL_API_KEYS": f"alice={ALICE}"}).caller_of(ALICE) is not None
    assert keys_for(RouterSpec(), {}) == NO_KEYS


@pytest.fixture
def send(backend: Any, tokenizer: ChatTokenizer) -> Send:
    """Call an app that knows alice's and bob's keys."""
    keys = load_keys(None, {"TWINPOOL_API_KEYS": f"alice={ALICE},bob={BOB}"})
    app = create_app(backend, tokenizer, "tiny", door=Door(keys))

    def once(method: str, path: str, **arguments: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(call())

    return once


PATHS = (
    "/v1/models",
    "/v1/models/tiny",
    "/health",
    "/health/ready",
    "/metrics",
    "/no/such/path",
    "/",
    "/cluster",
    "/openapi.json",
)


HEADERS = ("", "Bearer", "Bearer ", f"Bearer {ALICE}x", f"Basic {ALICE}", "Basic é", ALICE, "Bearer \xff")


@pytest.mark.parametrize("path", PATHS)
def test_no_route_opens_without_a_key(send: Send, path: str) -> None:
    for header in HEADERS:
        answer = send("GET", path, headers={"authorization": header.encode("latin-1")} if header else {})
        assert answer.status_code == 401, header
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert answer.headers["www-authenticate"].split()[0] == ("Basic" if path == "/" else "Bearer")
        assert "x-request-id" in answer.headers
        assert ALICE not in answer.text


def test_liveness_stays_open(send: Send) -> None:
    assert send("GET", "/health/live").status_code == 200
    assert send("HEAD", "/health/live").status_code == 200


def test_a_key_opens_as_bearer_and_as_password(send: Send) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert send("GET", "/v1/models", headers={"authorization": f"{scheme} {BOB}"}).status_code == 200
    assert send("GET", "/v1/models", auth=("anything", ALICE)).status_code == 200
    assert send("GET", "/v1/models", auth=(ALICE, "")).status_code == 401
    body = {"prompt": "hi", "max_tokens": 4}
    assert send("POST", "/v1/completions", json=body).status_code == 401
    assert send("POST", "/v1/completions", json=body, auth=("", ALICE)).status_code == 200


@pytest.mark.parametrize("header", [None, "Bearer sk-none", "Basic !", "nonsense"])
def test_without_keys_anything_is_accepted(call: Send, header: str | None) -> None:
    answer = call("GET", "/v1/models", headers={"authorization": header} if header else {})
    assert answer.status_code == 200
