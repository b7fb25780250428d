"""The choices of one job while they run: their events made into pieces, their end, and the client's leaving.

Between the dispatching side's events and the bytes of an answer. An event becomes pieces the moment it comes, so that
a token costs one turn of the event loop and no task. Whatever happens, leaving the `async with` cancels what still
runs. Knows no JSON.
"""

import asyncio
import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import assert_never

from starlette.types import Receive

from ...cluster.metrics import Timeline
from ..generation import Backend, Finished, GenerationEvent, GenerationFailed, PromptScored, TokensSent
from .choice import ChoiceText, Piece
from .echo import Echo
from .prepare import Choice, Job
from .tokenizer import ChatTokenizer
from .unread import MAX_UNREAD_ENTRIES, Unread, num_entries_of


class ClientLeftError(Exception):
    """The client closed the connection; nobody reads an answer any more."""


@dataclass
class ChoiceRun:
    """One choice. `last` ends its answer while its timeline is still to come, since a stop string ended it."""

    choice: Choice
    text: ChoiceText
    echo: Echo
    last: Piece | None = None
    is_over: bool = False


class RunningJob:
    """Enter it to start the choices; `next_piece` until `is_done`."""

    def __init__(self, job: Job, backend: Backend, tokenizer: ChatTokenizer, receive: Receive) -> None:
        self._job = job
        self._backend = backend
        self._receive = receive
        self._runs = [
            ChoiceRun(choice, ChoiceText(job, choice, tokenizer), Echo(choice, tokenizer)) for choice in job.choices
        ]
        self._unread = Unread(MAX_UNREAD_ENTRIES if job.stream else None)
        self._watcher: asyncio.Task[None] | None = None
        self._has_client_left = False
        self._num_open = len(job.choices)
        self.accepted_s = time.monotonic()
        self.timelines: dict[int, Timeline] = {}
        self.token_times_s: dict[int, list[float]] = {choice.index: [] for choice in job.choices}

    async def __aenter__(self) -> "RunningJob":
        try:
            for run in self._runs:
                if run.choice.request is None:
                    self._put_all(run, [*run.echo.rest(), run.text.finish("length")])
                else:
                    self._backend.submit(run.choice.request, partial(self._deliver, run))
            self._watcher = asyncio.create_task(self._watch_client())
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leave()

    @property
    def is_done(self) -> bool:
        return self._num_open == 0

    @property
    def num_output_tokens(self) -> int:
        return sum(run.text.num_tokens for run in self._runs)

    @property
    def mean_logprobs(self) -> list[float]:
        return [run.text.mean_logprob for run in self._runs]

    async def next_piece(self, timeout_s: float | None = None) -> Piece | GenerationFailed | None:
        """Return what comes next, None after `timeout_s` without anything. Raises ClientLeftError."""
        item = None if self._has_client_left else await self._unread.next(timeout_s)
        if self._has_client_left:
            raise ClientLeftError
        if isinstance(item, Exception):
            raise item
        if isinstance(item, Piece) and item.finish_reason:
            self._num_open -= 1
        return item

    async def _leave(self) -> None:
        self._cancel_all()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_client_left = True
        self._unread.wake()

    def _cancel_all(self) -> None:
        for run in self._runs:
            run.is_over = True
            if run.choice.request is not None:
                self._backend.cancel(run.choice.request.request_id)

    def _deliver(self, run: ChoiceRun, event: GenerationEvent) -> None:
        """Make pieces of an event. A bug of ours ends this job alone, not the loop that brought the event."""
        if run.is_over:
            return
        try:
            self._take(run, event)
        except Exception as error:
            run.is_over = True
            self._unread.put(error)
            self._unread.wake()

    def _take(self, run: ChoiceRun, event: GenerationEvent) -> None:
        match event:
            case PromptScored():
                self._put_all(run, run.echo.push(event.tokens))
            case TokensSent():
                self._take_tokens(run, event)
            case Finished():
                self._note_end(run, event)
                reason = "length" if run.choice.hides_output else event.reason
                self._put_all(run, [*run.echo.rest(), run.last or run.text.finish(reason)])
            case GenerationFailed():
                self._put(run, run.last or event, 0)
            case _:
                assert_never(event)

    def _take_tokens(self, run: ChoiceRun, event: TokensSent) -> None:
        choice, text = run.choice, run.text
        if run.last is not None:  # behind a stop string
            return
        num_before = text.num_tokens
        piece = Piece(choice.index, "") if choice.hides_output else text.push(event.tokens)
        self.token_times_s[choice.index].extend([time.monotonic()] * (text.num_tokens - num_before))
        self._put_all(run, run.echo.rest())
        if piece.finish_reason:
            run.last = piece
            assert choice.request is not None
            self._backend.finish(choice.request.request_id)  # its terminal event brings the timeline
        elif num_before == 0 or not piece.is_empty:  # the first is an event even when its text is held back
            self._put(run, piece, num_entries_of(event.tokens))

    def _put_all(self, run: ChoiceRun, pieces: list[Piece]) -> None:
        """Pieces of an echo count nothing: they are as long as what the client has sent."""
        for piece in pieces:
            self._put(run, piece, 0)

    def _put(self, run: ChoiceRun, item: Piece | GenerationFailed, num_entries: int) -> None:
        if isinstance(item, GenerationFailed) or item.finish_reason:
            run.is_over = True
        if not self._unread.put(item, num_entries):
            self._cancel_all()
        if self._job.stream or run.is_over:  # whole answers are put together at their end
            self._unread.wake()

    def _note_end(self, run: ChoiceRun, event: Finished) -> None:
        """Keep the timeline of what the client got: tokens behind a stop string are none of it."""
        num_tokens, timeline = run.text.num_tokens, event.timeline
        second_token_s = timeline.second_token_s if num_tokens > 1 else None
        self.timelines[run.choice.index] = dataclasses.replace(
            timeline, num_output_tokens=num_tokens, second_token_s=second_token_s
        )
