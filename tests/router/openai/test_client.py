"""The official `openai` client against a real server."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from twinpool.router.app import Application
from twinpool.router.generation import GenerationFailed

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="unused", max_retries=0, timeout=10) as client:
        yield client


def test_whole_answers(client: openai.OpenAI) -> None:
    """Models parse, usage and log-probabilities included."""
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2)
    assert [choice.message.content for choice in chat.choices] == ["hello world"] * 2
    assert chat.choices[0].logprobs is not None
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 4
    text = client.completions.create(model="tiny", prompt=["a", "b"], echo=True)
    assert [choice.text for choice in text.choices] == ["ahello world", "bhello world"]
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_streams(client: openai.OpenAI) -> None:
    """Joined deltas are the text, the last chunk has the usage."""
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options=options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello world"
    assert chunks[-1].usage is not None
    text = client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in text) == "hello world"


class OpenAfterComments:
    """ASGI middleware: opens the gate once that many keep-alive comments were sent."""

    def __init__(self, app: ASGIApp, gate: Any, num_comments: int) -> None:
        self._app, self._gate, self._num_missing = app, gate, num_comments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch(message: Message) -> None:
            await send(message)
            if b": keep-alive" in message.get("body", b""):
                self._num_missing -= 1
                if self._num_missing == 0:
                    self._gate.open()

        await self._app(scope, receive, watch)


def test_keep_alive_does_not_disturb(
    app: Application, backend: Any, new_gate: Any, say: Callable[..., Any], served: Callable[..., Any]
) -> None:
    """Comments before and between the tokens are invisible to the client."""
    gate = new_gate()
    backend.script = lambda request: [*say("a")[:-1], gate, *say("b")]
    with (
        served(OpenAfterComments(app, gate, num_comments=5)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=10) as client,
    ):
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ab"


def test_errors_have_their_classes(client: openai.OpenAI, backend: Any, say: Callable[..., Any]) -> None:
    """Each status becomes the client's exception, with code and param filled."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model="tiny", messages=[])
    assert empty.value.param == "messages"
    backend.script = lambda request: [GenerationFailed("queue_full", "Full.")]
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", prompt="a", stream=True)
    backend.script = lambda request: [*say("a")[:-1], GenerationFailed("worker_failed", "It died.")]
    with pytest.raises(openai.APIError, match="It died"):
        list(client.completions.create(model="tiny", prompt="a", stream=True))
