"""A job against a dispatching side that says everything at once: what the job takes does not depend on timing."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from twinpool.cluster.protocol.messages import SampledToken
from twinpool.router.generation import Deliver, GenerationEvent, GenerationFailed, GenerationRequest, TokensSent
from twinpool.router.openai.choice import Piece
from twinpool.router.openai.prepare import ServedModel, prepare_completion
from twinpool.router.openai.requests import CompletionBody, parse_body
from twinpool.router.openai.running import RunningJob
from twinpool.router.openai.structured import GrammarCheck
from twinpool.router.openai.tokenizer import ChatTokenizer
from twinpool.router.openai.unread import MAX_UNREAD_ENTRIES

Say = Callable[..., list[GenerationEvent]]


@dataclass
class EagerBackend:
    """Delivers all of `events` before `submit` returns, whatever it is told meanwhile."""

    events: Sequence[GenerationEvent]
    is_ready: bool = True
    max_model_len: int | None = None
    refuses: str = ""  # the request for which `submit` raises
    cancelled: list[str] = field(default_factory=list[str])
    finished: list[str] = field(default_factory=list[str])

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        if request.request_id == self.refuses:
            raise RuntimeError("a bug of ours")
        for event in self.events:
            deliver(event)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    def refusal(self, caller: object, priority: int) -> None:
        return None

    def status(self) -> dict[str, Any]:
        return {}


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def run_job(
    backend: EagerBackend, tokenizer: ChatTokenizer, **fields: Any
) -> tuple[list[Piece | GenerationFailed], RunningJob]:
    """Return every piece of a streamed completion, up to its end."""
    model = ServedModel("tiny", tokenizer, 512, GrammarCheck(tokenizer.grammars, lambda outcome: None))
    body = parse_body(CompletionBody, {"prompt": "a", "stream": True, "max_tokens": 500, **fields})
    job = await prepare_completion(body, model, "r")
    pieces: list[Piece | GenerationFailed] = []
    async with RunningJob(job, backend, tokenizer, never) as running:
        while not running.is_done:
            piece = await running.next_piece(1.0)
            assert piece is not None
            pieces.append(piece)
            if isinstance(piece, GenerationFailed):
                break
    return pieces, running


def test_what_comes_behind_a_stop_string_is_none_of_the_answer(tokenizer: ChatTokenizer, say: Say) -> None:
    backend = EagerBackend(say("hello world"))
    pieces, running = asyncio.run(run_job(backend, tokenizer, stop="o w"))
    assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)) == "hell"
    assert [piece.finish_reason for piece in pieces if isinstance(piece, Piece) and piece.finish_reason] == ["stop"]
    assert backend.finished == ["r"]
    assert running.timelines[0].num_output_tokens == running.num_output_tokens < len(tokenizer.encode("hello world"))


def test_a_failure_behind_a_stop_string_does_not_undo_the_answer(tokenizer: ChatTokenizer, say: Say) -> None:
    backend = EagerBackend([*say("hello world")[:-1], GenerationFailed("worker_failed", "It died.")])
    pieces, running = asyncio.run(run_job(backend, tokenizer, stop="o w"))
    assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)) == "hell"
    assert running.timelines == {}, "nobody told where the time went"


def test_a_stream_that_is_too_full_ends_its_request(tokenizer: ChatTokenizer, say: Say) -> None:
    """Its blocks must be free at once, not when the reader looks."""
    token = SampledToken(token=tokenizer.encode("h")[0])
    too_many = [TokensSent(i, (token,)) for i in range(MAX_UNREAD_ENTRIES + 1)]
    backend = EagerBackend([*too_many, *say("more")])
    pieces, _ = asyncio.run(run_job(backend, tokenizer))
    assert [type(piece) for piece in pieces] == [GenerationFailed]
    assert backend.cancelled[0] == "r"


def test_a_choice_that_cannot_be_begun_ends_those_before_it(tokenizer: ChatTokenizer) -> None:
    backend = EagerBackend([], refuses="r-1")
    with pytest.raises(RuntimeError):
        asyncio.run(run_job(backend, tokenizer, n=2))
    assert "r-0" in backend.cancelled
