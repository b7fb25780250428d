"""The answer to one job, streamed or whole, as an ASGI response; the last station of a request in the router.

Nothing is sent before the first token is there, so an error up to then has its true status; only when that takes
longer than the keep-alive period does a stream open early. Later errors come as an error event before `[DONE]`.
"""

import logging
import re
import time
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..generation import Backend, GenerationFailed
from ..job_record import CLIENT_LEFT, FINISHED, JobRecord
from ..metrics import Metrics
from ..request_log import log_ended
from ..tracing import Traces
from .choice import Piece
from .errors import INTERNAL_ERROR, ErrorReply, RequestFailedError, reply_of_failure
from .formats import Answer, Format, Json, best_choices, encode, timing_of, usage_of
from .prepare import Job, in_thread_if_long
from .running import ClientLeftError, RunningJob
from .tokenizer import ChatTokenizer

KEEP_ALIVE_S = 10.0
LINE_SEPARATORS = re.compile("[\\x85\\u2028\\u2029]")  # JSON escapes those of ASCII by itself
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = logging.getLogger(__name__)


class JobResponse(Response):
    """Runs the job when it is called; raises RequestFailedError as long as nothing was sent."""

    def __init__(
        self,
        job: Job,
        backend: Backend,
        tokenizer: ChatTokenizer,
        metrics: Metrics,
        keep_alive_s: float = KEEP_ALIVE_S,
        traces: Traces | None = None,
    ) -> None:
        self._job = job
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._traces = traces
        self._endpoint = "chat" if job.is_chat else "completions"
        self._format = Format(job, tokenizer)
        self._traceparent: str | None = None
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        self._traceparent = Headers(scope=scope).get("traceparent")
        self._metrics.prompt_tokens.inc(job.num_prompt_tokens)
        running = RunningJob(job, self._backend, self._tokenizer, receive)
        with self._metrics.running.labels("stream" if job.stream else "whole").track_inprogress():
            try:
                async with running:
                    if job.stream:
                        await self._stream(running, send)
                    else:
                        await self._whole(running, scope, receive, send)
            except ClientLeftError:
                self._end(running, CLIENT_LEFT)
            except RequestFailedError as error:
                self._observe(running, reply_of_failure(error.failure).code)
                raise  # answered and counted by the application's handler
            except Exception:
                self._observe(running, INTERNAL_ERROR.code)
                raise  # counted by RequestFrame

    async def _whole(self, running: RunningJob, scope: Scope, receive: Receive, send: Send) -> None:
        answers = [Answer() for _ in self._job.choices]
        while not running.is_done:
            piece = await running.next_piece()
            if isinstance(piece, GenerationFailed):
                raise RequestFailedError(piece)
            if piece is not None:
                answers[piece.index].add(piece)
        chosen = best_choices(self._job, running.mean_logprobs)
        usage, timing = self._account(running, chosen[0])
        returned = [answers[index] for index in chosen]
        num_entries = sum(len(answer.details) for answer in returned) * (1 + (self._job.num_logprobs or 0))
        body = await in_thread_if_long(num_entries, lambda: _encode(self._format.whole(returned, usage, timing)))
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(self, running: RunningJob, send: Send) -> None:
        first = await running.next_piece(self._keep_alive_s)
        if isinstance(first, GenerationFailed):
            raise RequestFailedError(first)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        opening = _frames(self._format.opening_chunks())
        await _send_body(send, opening + (KEEP_ALIVE if first is None else self._piece_frames(first)))
        try:
            failure = await self._stream_pieces(running, send)
        except ClientLeftError:
            raise
        except Exception:
            log.exception("request %s failed inside the router", self._job.request_id)
            failure = INTERNAL_ERROR
        if failure is not None:
            self._end(running, failure.code)
            await _send_body(send, _frames([failure.body()]) + DONE, more_body=False)
            return
        closing = self._format.closing_chunk(*self._account(running))
        await _send_body(send, (_frames([closing]) if closing else b"") + DONE, more_body=False)

    async def _stream_pieces(self, running: RunningJob, send: Send) -> ErrorReply | None:
        while not running.is_done:
            piece = await running.next_piece(self._keep_alive_s)
            if isinstance(piece, GenerationFailed):
                log.warning("request %s broke off: %s", self._job.request_id, piece.message)
                return reply_of_failure(piece)
            frames = KEEP_ALIVE if piece is None else self._piece_frames(piece)
            if frames:
                await _send_body(send, frames)
        return None

    def _piece_frames(self, piece: Piece) -> bytes:
        frame = self._format.text_frame(piece)
        if frame is not None:
            return _in_lines(f"data: {frame[0]}{encode(piece.text)}{frame[1]}\n\n")
        return _frames(self._format.chunks(piece))

    def _account(self, running: RunningJob, first: int = 0) -> tuple[Json, Json | None]:
        """Count the finished job, and return its usage and the timing of its choice `first`."""
        self._end(running, FINISHED)
        usage = usage_of(self._job, running.num_output_tokens, running.timelines)
        return usage, timing_of(running.timelines.get(first))

    def _end(self, running: RunningJob, outcome: str) -> None:
        self._metrics.count(self._endpoint, outcome)
        self._observe(running, outcome)

    def _observe(self, running: RunningJob, outcome: str) -> None:
        job, first = self._job, self._job.choices[0].request
        record = JobRecord(
            request_id=job.request_id,
            endpoint=self._endpoint,
            model=job.model,
            outcome=outcome,
            accepted_s=running.accepted_s,
            ended_s=time.monotonic(),
            num_prompt_tokens=job.num_prompt_tokens,
            num_output_tokens=running.num_output_tokens,
            token_times_s=running.token_times_s,
            timelines=running.timelines,
            sampling=first.sampling if first is not None else None,
            traceparent=self._traceparent,
        )
        self._metrics.observe(record)
        if self._traces is not None:
            self._traces.record(record)
        log_ended(record, first.caller.name if first is not None else "")


def _encode(whole: Json) -> bytes:
    """Encode an answer choice by choice: from a thread, the loop waits for the encoding of one at most."""
    fields = {name: encode(value) for name, value in whole.items() if name != "choices"}
    choices = "[" + ",".join(map(encode, whole["choices"])) + "]"
    return ("{" + ",".join(f'"{name}":{fields.get(name, choices)}' for name in whole) + "}").encode()


def _frames(chunks: Iterable[Json]) -> bytes:
    """Encode chunks as events."""
    return _in_lines("".join(f"data: {encode(chunk)}\n\n" for chunk in chunks))


def _in_lines(text: str) -> bytes:
    """Return events as bytes. A line stays one line for clients that cut at every separator Unicode knows, too."""
    if not text.isascii():
        text = LINE_SEPARATORS.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
    return text.encode()


async def _send_body(send: Send, body: bytes, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
