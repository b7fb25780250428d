"""The admin application's questions to live workers, over HTTP: answers, refusals, bad bodies, clients that leave."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from twinpool.router.app import create_admin_app
from twinpool.router.probes import PassesQuestion, ProbeRefusal, ProbeResult, TransferQuestion

PASSES = {"worker": "prompt-0", "rows": [[0, 8], [9, 1]], "num_warmup": 0, "num_repeats": 2, "limit_s": 3}
TRANSFER = {"prompt": "prompt-0", "completion": "completion-0", "num_tokens": 7}


class Backend:
    """Answers every question with `result`, or never."""

    is_ready = True
    max_model_len = 9

    def __init__(self, result: ProbeResult | None) -> None:
        self.result = result
        self.questions: list[PassesQuestion | TransferQuestion] = []
        self.was_cancelled = False

    def status(self) -> dict[str, Any]:
        return {}

    async def probe(self, question: PassesQuestion | TransferQuestion) -> ProbeResult:
        self.questions.append(question)
        try:
            while self.result is None:
                await asyncio.Event().wait()
            return self.result
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


@pytest.fixture
def post() -> Callable[[Backend, str, Any], httpx.Response]:
    def send(backend: Backend, path: str, body: Any) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(create_admin_app(backend))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
                return await client.post(path, json=body)

        return asyncio.run(once())

    return send


def test_times_come_back(post: Any) -> None:
    backend = Backend((0.5, 0.25))
    assert post(backend, "/probe/passes", PASSES).json() == {"pass_s": [0.5, 0.25]}
    assert post(backend, "/probe/transfer", TRANSFER).json() == {"transfer_s": 0.5}
    assert backend.questions == [
        PassesQuestion(worker="prompt-0", rows=((0, 8), (9, 1)), num_warmup=0, num_repeats=2, limit_s=3),
        TransferQuestion(prompt="prompt-0", completion="completion-0", num_tokens=7),
    ]


@pytest.mark.parametrize(("is_retryable", "code"), [(True, "worker_busy"), (False, "probe_refused")])
def test_a_refusal_is_a_conflict_with_its_reason(post: Any, is_retryable: bool, code: str) -> None:
    response = post(Backend(ProbeRefusal("because", is_retryable)), "/probe/passes", PASSES)
    assert response.status_code == 409
    assert (response.json()["error"]["message"], response.json()["error"]["code"]) == ("because", code)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/probe/passes", {"rows": [[0, 1]]}, "worker"),
        ("/probe/passes", PASSES | {"rows": []}, "rows"),
        ("/probe/passes", PASSES | {"rows": [[0, 1]] * 1025}, "rows"),
        ("/probe/passes", PASSES | {"rows": [[0, 0]]}, "rows[0][1]"),
        ("/probe/passes", PASSES | {"rows": [[-1, 1]]}, "rows[0][0]"),
        ("/probe/passes", PASSES | {"rows": [["0", 1]]}, "rows[0][0]"),
        ("/probe/passes", PASSES | {"num_repeats": 1001}, "num_repeats"),
        ("/probe/passes", PASSES | {"limit_s": 0}, "limit_s"),
        ("/probe/passes", PASSES | {"repeats": 3}, "repeats"),
        ("/probe/transfer", TRANSFER | {"num_tokens": 2**20}, "num_tokens"),
        ("/probe/transfer", TRANSFER | {"num_tokens": 1.5}, "num_tokens"),
    ],
)
def test_a_bad_question_names_its_field_and_reaches_nobody(post: Any, path: str, body: Any, param: str) -> None:
    backend = Backend((1.0,))
    response = post(backend, path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert backend.questions == []


def test_a_client_that_leaves_ends_its_probe() -> None:
    backend = Backend(None)
    body = b'{"prompt": "prompt-0", "completion": "completion-0", "num_tokens": 7}'

    async def call() -> list[Any]:
        events = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
        sent: list[Any] = []

        async def receive() -> Any:
            return events.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/probe/transfer", "headers": headers, "query_string": b""}
        async with asyncio.timeout(5):
            await create_admin_app(backend)(scope, receive, send)  # type: ignore[arg-type]
        return sent

    assert asyncio.run(call()) == []
    assert backend.was_cancelled
