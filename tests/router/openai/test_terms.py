"""For whom a request is served, how urgently, and for how long anybody waits; and the refusal before all that."""

import hashlib
from typing import Any

import pytest
from starlette.testclient import TestClient
from twinpool.router.app import Door, create_app
from twinpool.router.auth import ApiKeys
from twinpool.router.generation import ANYBODY, Caller, GenerationFailed
from twinpool.router.openai.tokenizer import ChatTokenizer
from twinpool.router.quotas import Quota

BODY = {"model": "tiny", "prompt": "hi"}
PATH = "/v1/completions"
KEY = "a key of Laura"
LAURA = Caller("laura", 2.0, Quota(3))


@pytest.mark.parametrize(
    ("fields", "caller"),
    [({}, ANYBODY), ({"user": ""}, ANYBODY), ({"user": "u"}, Caller("u")), ({"user": "u" * 99}, Caller("u" * 64))],
)
def test_without_keys_a_caller_is_the_user_that_the_client_names(
    call: Any, backend: Any, fields: dict[str, Any], caller: Caller
) -> None:
    assert call("POST", PATH, json=BODY | fields).status_code == 200
    assert [request.caller for request in backend.requests] == [caller]
    assert backend.asked == [caller]


def test_whoever_has_a_key_is_known_by_it(backend: Any, tokenizer: ChatTokenizer) -> None:
    """Else a key's quota would end where its holder invents a user."""
    keys = ApiKeys({hashlib.sha256(KEY.encode()).digest(): LAURA})
    app = create_app(backend, tokenizer, "tiny", door=Door(keys=keys))
    with TestClient(app) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        response = client.post(PATH, json=BODY | {"user": "somebody else", "n": 2}, headers=headers)
    assert response.status_code == 200
    assert [request.caller for request in backend.requests] == [LAURA, LAURA]


@pytest.mark.parametrize(("fields", "priority"), [({}, 0), ({"priority": None}, 0), ({"priority": -3}, -3)])
def test_the_priority_is_the_clients(call: Any, backend: Any, fields: dict[str, Any], priority: int) -> None:
    call("POST", PATH, json=BODY | fields)
    assert [request.priority for request in backend.requests] == [priority]


@pytest.mark.parametrize(("headers", "timeout_s"), [({}, None), ({"x-request-timeout-ms": "1500"}, 1.5)])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_the_header_bounds_the_time(
    call: Any, backend: Any, path: str, headers: dict[str, str], timeout_s: float | None
) -> None:
    body = BODY | {"messages": [{"role": "user", "content": "hi"}]}
    assert call("POST", path, json=body, headers=headers).status_code == 200
    assert [request.timeout_s for request in backend.requests] == [timeout_s]


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "1e3", "soon", "", "9" * 10, "٣"])
def test_what_is_no_number_of_milliseconds_is_refused(call: Any, backend: Any, value: str) -> None:
    response = call("POST", PATH, json=BODY, headers={"x-request-timeout-ms": value.encode()})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("x-request-timeout-ms", "invalid_value")
    assert backend.requests == []


@pytest.mark.parametrize(
    ("failure", "status", "code", "kind", "after"),
    [
        (GenerationFailed("queue_full", "Full.", 7.2), 503, "queue_full", "server_error", "8"),
        (GenerationFailed("no_worker", "Nobody."), 503, "no_worker", "server_error", "2"),
        (GenerationFailed("rate_limited", "Enough.", 0.1), 429, "rate_limit_exceeded", "rate_limit_error", "1"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_who_has_no_chance_is_told_before_the_prompt_is_looked_at(
    call: Any,
    backend: Any,
    failure: GenerationFailed,
    status: int,
    code: str,
    kind: str,
    after: str,
    fields: dict[str, Any],
) -> None:
    """I1, I2: with a status and a Retry-After, as a stream too."""
    backend.refused = failure
    response = call("POST", PATH, json=BODY | fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, code, kind)
    assert response.headers["retry-after"] == after
    assert backend.requests == []


def test_a_wrong_request_is_told_so_even_by_a_full_router(call: Any, backend: Any) -> None:
    """A client that is asked to come back with it would be refused again."""
    backend.refused = GenerationFailed("queue_full", "Full.")
    assert call("POST", PATH, json=BODY | {"top_p": 7}).status_code == 400
    assert call("POST", PATH, json=BODY | {"model": "other"}).status_code == 404


def test_a_request_that_takes_too_long_is_a_504(call: Any, backend: Any) -> None:
    backend.script = lambda request: [GenerationFailed("timeout", "The request did not finish within 0.5 s.")]
    response = call("POST", PATH, json=BODY, headers={"x-request-timeout-ms": "500"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert "retry-after" not in response.headers
