"""The JSON of both endpoints: whole answers, streamed chunks, log-probabilities, usage. Pure; knows no HTTP."""

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...cluster.metrics import Timeline
from .choice import AnswerReason, Piece, TokenDetail
from .prepare import Job
from .tokenizer import ChatTokenizer
from .tool_calls import ToolCall

DERIVED = ("ttft_s", "transfer_s", "first_decode_s", "decode_s", "kv_share_hidden")  # of a timeline
LOWEST_LOGPROB = -9999.0  # "very unlikely" in OpenAI's schema; JSON has no -Infinity

PLACE = "\0text\0"  # where the text of a chunk goes; no name of a model holds it

Json = dict[str, Any]
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encode(value: Any) -> str:
    """Return `value` as JSON in one line of UTF-8."""
    return ENCODER.encode(value)


@dataclass
class Answer:
    """A choice as it grows: what the whole answer shows of it."""

    texts: list[str] = field(default_factory=list[str])
    details: list[TokenDetail] = field(default_factory=list[TokenDetail])
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: AnswerReason | None = None
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.details.extend(piece.details)
        self.token_ids.extend(piece.token_ids)
        self.finish_reason = piece.finish_reason
        self.calls.extend(piece.calls)


class Format:
    """Everything that one job's bodies share; `chunk` and `whole` differ between the endpoints."""

    def __init__(self, job: Job, tokenizer: ChatTokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        prefix, kind = ("chatcmpl", "chat.completion") if job.is_chat else ("cmpl", "text_completion")
        head: Json = {"id": f"{prefix}-{job.request_id}", "created": int(time.time()), "model": job.model}
        self._whole_head: Json = head | {"object": kind}
        self._chunk_head: Json = head | {"object": "chat.completion.chunk" if job.is_chat else kind}
        self._num_sent_tokens = [0] * len(job.choices)
        self._num_sent_calls = [0] * len(job.choices)
        self._text_frames: dict[int, tuple[str, str]] = {}

    def opening_chunks(self) -> list[Json]:
        """Return what comes before any content: in a chat one role chunk for each choice."""
        if not self._job.is_chat:
            return []
        return [
            self._chunk(choice.index, {"delta": {"role": "assistant", "content": ""}}, None, None)
            for choice in self._job.choices
        ]

    def chunks(self, piece: Piece) -> list[Json]:
        """Return the chunks of `piece`, none for an empty one; a chat's finish reason comes in a chunk of its own."""
        if piece.is_empty:
            return []
        self._num_sent_tokens[piece.index] = piece.num_tokens
        logprobs = self._logprobs(piece.details)
        if not self._job.is_chat:
            content = {"text": piece.text} | self._token_ids(piece.token_ids)
            return [self._chunk(piece.index, content, logprobs, piece.finish_reason)]
        chunks: list[Json] = []
        if piece.text or piece.details or piece.token_ids:
            content = {"delta": {"content": piece.text}} | self._token_ids(piece.token_ids)
            chunks.append(self._chunk(piece.index, content, logprobs, None))
        if piece.calls:
            first = self._num_sent_calls[piece.index]
            self._num_sent_calls[piece.index] += len(piece.calls)
            calls = [{"index": first + i, **_call(call)} for i, call in enumerate(piece.calls)]
            chunks.append(self._chunk(piece.index, {"delta": {"tool_calls": calls}}, None, None))
        if piece.finish_reason:
            chunks.append(self._chunk(piece.index, {"delta": {}}, None, piece.finish_reason))
        return chunks

    def text_frame(self, piece: Piece) -> tuple[str, str] | None:
        """Return what stands before and behind the text in the JSON of a chunk that is text alone, else None.

        Most chunks are, and differ in nothing else; so they need not be put together and encoded each.
        """
        job = self._job
        is_plain = job.num_logprobs is None and not job.return_token_ids and not job.include_usage_in_chunks
        if not (is_plain and piece.text) or piece.finish_reason or piece.calls:
            return None
        frame = self._text_frames.get(piece.index)
        if frame is None:
            chunk = self.chunks(dataclasses.replace(piece, text=PLACE))[0]
            before, behind = encode(chunk).split(encode(PLACE))
            frame = self._text_frames[piece.index] = before, behind
        return frame

    def closing_chunk(self, usage: Json, timing: Json | None) -> Json | None:
        """Return the chunk without choices that holds what was asked for of usage and timing."""
        if not (self._job.include_usage or self._job.include_timing):
            return None
        tail: Json = {"usage": usage} if self._job.include_usage else {}
        if self._job.include_timing:
            tail["timing"] = timing
        return self._chunk_head | {"choices": []} | tail

    def whole(self, answers: Sequence[Answer], usage: Json, timing: Json | None) -> Json:
        """Return the body of a non-streamed answer; `answers` by choice index."""
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        tail: Json = {"timing": timing} if self._job.include_timing else {}
        return self._whole_head | {"choices": choices, "usage": usage} | tail

    def _whole_choice(self, index: int, answer: Answer) -> Json:
        text = "".join(answer.texts)
        content: Json = {"text": text}
        if self._job.is_chat:
            calls: Json = {"tool_calls": [_call(call) for call in answer.calls]} if answer.calls else {}
            shown = None if calls and not text else text
            content = {"message": {"role": "assistant", "content": shown, "refusal": None, **calls}}
        logprobs = self._logprobs(answer.details)
        content |= self._token_ids(answer.token_ids)
        return {"index": index} | content | {"logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _chunk(self, index: int, content: Json, logprobs: Json | None, finish_reason: AnswerReason | None) -> Json:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._chunk_head, "choices": [choice], **self._chunk_tail()}

    def _chunk_tail(self) -> Json:
        if self._job.include_usage_in_chunks:
            return {"usage": usage_of(self._job, sum(self._num_sent_tokens), None)}
        return {"usage": None} if self._job.include_usage else {}

    def _token_ids(self, token_ids: Sequence[int]) -> Json:
        return {"token_ids": list(token_ids)} if self._job.return_token_ids else {}

    def _logprobs(self, details: Sequence[TokenDetail]) -> Json | None:
        if self._job.num_logprobs is None:
            return None
        return self._chat_logprobs(details) if self._job.is_chat else self._completion_logprobs(details)

    def _chat_logprobs(self, details: Sequence[TokenDetail]) -> Json:
        content: list[Json] = []
        for detail in details:
            entry = self._entry(detail.token.token, detail.token.logprob)
            entry["top_logprobs"] = [self._entry(*pair) for pair in detail.token.top[: self._job.num_logprobs]]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, details: Sequence[TokenDetail]) -> Json:
        top = [
            {self._shown(token): _finite(logprob) for token, logprob in detail.token.top[: self._job.num_logprobs]}
            if detail.token.logprob is not None
            else None  # a prompt's first token
            for detail in details
        ]
        return {
            "tokens": [self._shown(detail.token.token) for detail in details],
            "token_logprobs": [_finite(detail.token.logprob) for detail in details],
            "top_logprobs": top if self._job.num_logprobs else None,
            "text_offset": [detail.text_offset for detail in details],
        }

    def _entry(self, token: int, logprob: float | None) -> Json:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}

    def _shown(self, token: int) -> str:
        """Return the token's text; bytes that are no text on their own in hexadecimal, so that keys stay distinct."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def best_choices(job: Job, mean_logprobs: Sequence[float]) -> list[int]:
    """Return which choices are the answer, prompt by prompt: all, or of more candidates the likeliest, best first."""
    size, best = job.num_choices_per_prompt, list[int]()
    for first in range(0, len(job.choices), size):
        candidates = range(first, first + size)
        if size > job.num_returned_per_prompt:
            candidates = sorted(candidates, key=lambda index: -mean_logprobs[index])
        best += candidates[: job.num_returned_per_prompt]
    return best


def usage_of(job: Job, num_output_tokens: int, timelines: dict[int, Timeline] | None) -> Json:
    """Return the usage; of choices that ran, `timelines` by index know the cached tokens once all have ended."""
    usage: Json = {
        "prompt_tokens": job.num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": job.num_prompt_tokens + num_output_tokens,
    }
    first_of_each_prompt = range(0, len(job.choices), job.num_choices_per_prompt)
    asked = [index for index in first_of_each_prompt if job.choices[index].request is not None]
    if timelines is not None and all(index in timelines for index in asked):
        num_cached_tokens = sum(timelines[index].num_cached_tokens for index in asked)
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens}
    return usage


def timing_of(timeline: Timeline | None) -> Json | None:
    """Return the timeline as a body's `timing`, with what it adds up to."""
    if timeline is None:
        return None
    return dict(vars(timeline)) | {name: getattr(timeline, name) for name in DERIVED}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN as well
