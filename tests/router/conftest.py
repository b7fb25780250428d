"""A byte-level tokenizer folder, a scripted backend, and two ways to call the app: in process and over loopback."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from twinpool.cluster.metrics import Timeline
from twinpool.cluster.protocol.messages import Load, SampledToken
from twinpool.router.app import Application, create_app
from twinpool.router.generation import (
    Caller,
    Deliver,
    Finished,
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    TokensSent,
)
from twinpool.router.openai.tokenizer import ChatTokenizer

CHAT_TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TIMELINE = Timeline(
    queue_s=0.01,
    grant_s=0.002,
    prefill_queue_s=0.003,
    prefill_s=0.1,
    return_s=0.005,
    num_prompt_tokens=8,
    num_output_tokens=3,
    num_cached_tokens=4,
    num_attempts=1,
    num_preemptions=0,
    num_kv_bytes=1000,
    num_kv_bytes_arrived=950,
    last_kv_s=-0.01,
    second_token_s=0.02,
    end_s=0.3,
)


class Gate:
    """Closed until `open` is called, from any thread."""

    def __init__(self) -> None:
        self._opened: Future[None] = Future()

    def open(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    async def wait(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._opened))


ScriptStep = GenerationEvent | Exception | Gate


@dataclass
class ScriptedBackend:
    """Plays `script(request)`; a gate in it is waited for. What is no event makes its receiver raise."""

    script: Callable[[GenerationRequest], list[ScriptStep]]
    is_ready: bool = True
    max_model_len: int | None = 1024
    requests: list[GenerationRequest] = field(default_factory=list[GenerationRequest])
    refused: GenerationFailed | None = None  # what everybody is told at once
    asked: list[Caller] = field(default_factory=list[Caller])
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"])
    finished: set[str] = field(default_factory=set[str])
    waiting: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        self.requests.append(request)
        self.tasks[request.request_id] = asyncio.create_task(self._play(request, deliver))

    def cancel(self, request_id: str) -> None:
        task = self.tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def _play(self, request: GenerationRequest, deliver: Deliver) -> None:
        try:
            for step in self.script(request):
                if request.request_id in self.finished:
                    deliver(Finished("stop", TIMELINE))
                    return
                if isinstance(step, Gate):
                    self.waiting.set()
                    await step.wait()
                else:
                    deliver(step)
                    await asyncio.sleep(0)
        finally:
            self.closed.set()

    def refusal(self, caller: Caller, priority: int) -> GenerationFailed | None:
        self.asked.append(caller)
        return self.refused

    def finish(self, request_id: str) -> None:
        self.finished.add(request_id)

    def status(self) -> dict[str, Any]:
        load = Load(num_blocks=100, num_free_blocks=60, num_queued_tokens=5, num_sequences=2).model_dump()
        workers = [
            {"name": "prompt-0", "role": "PROMPT", "state": "alive", "load": load},
            {"name": "completion-0", "role": "COMPLETION", "state": "alive", "load": load},
            {"name": "completion-1", "role": "COMPLETION", "state": "suspect", "load": None},
        ]
        return {"workers": workers, "queued": 7, "running": 3}


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    """256 byte tokens, a few merges, three special tokens and an added one that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ã", "©")]
    names = alphabet + [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<zażółć>", special=False)])
    return tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    files: dict[str, Any] = {
        "tokenizer_config.json": special | {"chat_template": CHAT_TEMPLATE},
        "config.json": {"vocab_size": byte_level_tokenizer.get_vocab_size(), "max_position_embeddings": 512},
        "generation_config.json": {"eos_token_id": byte_level_tokenizer.token_to_id("<|im_end|>")},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(model_folder)


@pytest.fixture
def say(tokenizer: ChatTokenizer) -> Callable[..., list[ScriptStep]]:
    """Return the events of an answer with that text, one byte-level token an event, log-probabilities included."""

    def events(text: str, reason: str = "stop", tokens_per_event: int = 1) -> list[ScriptStep]:
        ids = tokenizer.encode(text)
        sampled = [SampledToken(token=i, logprob=-0.5, top=((i, -0.5), (0, float("-inf")))) for i in ids]
        groups = [TokensSent(i, tuple(sampled[i : i + tokens_per_event])) for i in range(0, len(ids), tokens_per_event)]
        return [*groups, Finished(reason, TIMELINE)]

    return events


@pytest.fixture
def new_gate() -> type[Gate]:
    return Gate


@pytest.fixture
def backend(say: Callable[..., list[ScriptStep]]) -> ScriptedBackend:
    """Answers everything with "hello world"."""
    return ScriptedBackend(lambda request: say("hello world"))


@pytest.fixture
def app(backend: ScriptedBackend, tokenizer: ChatTokenizer) -> Application:
    return create_app(backend, tokenizer, "tiny", keep_alive_s=0.02)


Call = Callable[..., httpx.Response]


@pytest.fixture
def call(app: Application) -> Call:
    """Call the app in process; `call("POST", path, json=…)`."""

    def send(method: str, path: str, **arguments: Any) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(once())

    return send


def parse_events(text: str) -> list[Any]:
    """Parse a stream strictly: only data and comment lines, blank line after each, [DONE] last."""
    assert text.endswith("data: [DONE]\n\n")
    frames = [frame for frame in text.split("\n\n")[:-2] if not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@pytest.fixture
def events_of() -> Callable[[str], list[Any]]:
    return parse_events


@contextmanager
def _served(app: ASGIApp) -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


@pytest.fixture
def served() -> Callable[[ASGIApp], AbstractContextManager[str]]:
    """Serve an app by uvicorn on a loopback port of its own, whose URL one gets."""
    return _served


@pytest.fixture
def server_url(app: Application) -> Iterator[str]:
    with _served(app) as url:
        yield url
