"""The published document tells the truth: whatever is generated from it gets an answer that it foresees."""

from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.routing import Route
from twinpool.router.app import Application
from twinpool.router.openai.document import EXAMPLES, openapi_document

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.allow_header_conformance,
]
SEED = 4
ESSENTIAL = {"prompt", "messages", "tokens"}


def send_many(
    operation: APIOperation, mode: GenerationMode, num_cases: int, statuses: Counter[tuple[str, int]]
) -> None:
    """Call one operation with generated requests, check each answer and count its status."""

    @seed(SEED)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), kept=st.sets(st.integers(0, 50), max_size=4))
    def send(case: Case, kept: set[int]) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):  # of all fields at once some never agree
            optional = sorted(case.body.keys() - ESSENTIAL)
            dropped = {name for i, name in enumerate(optional) if i not in kept}
            case.body = {name: value for name, value in case.body.items() if name not in dropped}
        statuses[operation.path, case.call_and_validate(checks=CHECKS).status_code] += 1

    send()


@pytest.mark.parametrize(
    "num_cases", [40, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=str
)
def test_generated_requests_get_foreseen_answers(app: Application, num_cases: int) -> None:
    """Bodies that fit and bodies that do not, over all paths: no 5xx, no undocumented status, header, type or shape."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [found.ok() for found in schema.get_all_operations()]
    num_each = num_cases // (2 * sum(operation.method == "post" for operation in operations))
    statuses: Counter[tuple[str, int]] = Counter()
    for operation in operations:
        if operation.method == "post":
            send_many(operation, GenerationMode.POSITIVE, num_each, statuses)
            send_many(operation, GenerationMode.NEGATIVE, num_each, statuses)
        else:
            send_many(operation, GenerationMode.POSITIVE, 1, statuses)  # there is nothing to vary
    for operation in operations:
        expected = {200, 400} if operation.method == "post" else {200}
        assert expected <= {status for path, status in statuses if path == operation.path}, (operation.path, statuses)
    assert sum(statuses.values()) >= num_cases


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_streams_are_as_documented(app: Application, path: str, prompt: dict[str, Any]) -> None:
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)[path]["POST"]
    case = operation.Case(body={**prompt, "stream": True}, media_type="application/json")
    answer = case.call_and_validate(checks=CHECKS)
    assert answer.status_code == 200
    assert answer.headers["content-type"][0].startswith("text/event-stream")


def test_every_route_is_documented(app: Application, call: Any) -> None:
    """And nothing else; the page's own files are not for clients."""
    document = call("GET", "/openapi.json").json()
    routes = {
        (route.path.replace("{name:path}", "{model}"), method.lower())
        for route in app.api.routes
        if isinstance(route, Route) and not route.path.startswith("/page/")
        for method in route.methods or ()
    }
    documented = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert routes - {("/", "head")} == documented


def test_the_examples_work(call: Any) -> None:
    document = call("GET", "/openapi.json").json()
    for path, operations in document["paths"].items():
        if "post" in operations:
            example = operations["post"]["requestBody"]["content"]["application/json"]["example"]
            answer: httpx.Response = call("POST", path, json=example | {"model": "tiny"})
            assert answer.status_code == 200, answer.text
    assert set(EXAMPLES) <= set(document["components"]["schemas"])


@pytest.mark.parametrize("has_keys", [False, True])
def test_keys_are_asked_for_only_where_there_are_any(has_keys: bool) -> None:
    document = openapi_document("tiny", "1", has_keys)
    assert bool(document["security"]) == has_keys
    assert document["paths"]["/health/live"]["get"]["security"] == []
