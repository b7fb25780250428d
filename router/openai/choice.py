"""The generated text of one choice, made from its tokens one by one; the same for a streamed and a whole answer.

A token is counted when it was sampled, whether or not it shows: stop tokens and special tokens have no text, the
tokens of a stop string are cut off. Knows no JSON and no worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...cluster.protocol.messages import FinishReason, SampledToken
from .prepare import Choice, Job
from .text import StopMatcher, Utf8Decoder
from .tokenizer import ChatTokenizer
from .tool_calls import CLOSE, OPEN, Found, ToolCall

AnswerReason = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """A token with its log-probability; `text_offset` is where its text begins, in characters."""

    token: SampledToken
    text_offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new in one choice. The last piece of a choice has a finish reason; calls come after the text."""

    index: int
    text: str
    details: tuple[TokenDetail, ...] = ()
    finish_reason: AnswerReason | None = None
    token_ids: tuple[int, ...] = ()  # only when they were asked for
    num_tokens: int = 0  # of the choice up to here
    calls: tuple[ToolCall, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.details or self.finish_reason or self.token_ids or self.calls)


class ChoiceText:
    """State of one choice. After a piece with a finish reason nothing may be pushed."""

    def __init__(self, job: Job, choice: Choice, tokenizer: ChatTokenizer) -> None:
        sampling = choice.request.sampling if choice.request else None
        self.num_tokens = 0
        self._sum_logprob = 0.0
        self._index = choice.index
        self._tokenizer = tokenizer
        self._skip_special_tokens = job.skip_special_tokens
        self._wants_token_ids = job.return_token_ids
        self._wants_details = job.num_logprobs is not None
        markers = job.calls is not None  # of calls, which some vocabularies have among their special tokens
        self._shown_names = frozenset({OPEN.encode(), CLOSE.encode()} if markers else ())
        self._hidden_ids = frozenset(sampling.stop_token_ids if sampling and not job.includes_stop else ())
        self._min_tokens = sampling.min_tokens if sampling else 0
        self._num_characters = choice.text_offset
        self._decoder = Utf8Decoder()
        self._matcher = StopMatcher(job.stop, job.includes_stop)
        self._expected = job.calls
        self._parser = job.calls.parser() if job.calls is not None else None
        self._calls: list[ToolCall] = []

    @property
    def mean_logprob(self) -> float:
        """Of the tokens so far, whose log-probabilities must have been asked for; what best_of ranks by."""
        return self._sum_logprob / self.num_tokens if self.num_tokens else 0.0

    def push(self, tokens: Sequence[SampledToken]) -> Piece:
        """Take the next tokens; those behind a completed stop string are dropped and not counted."""
        text, calls = "", list[ToolCall]()
        details: list[TokenDetail] = []
        token_ids: list[int] = []
        for token in tokens:
            self.num_tokens += 1
            self._sum_logprob += token.logprob or 0.0
            if self._wants_token_ids:
                token_ids.append(token.token)
            if self._wants_details:
                details.append(TokenDetail(token, self._num_characters))
            decoded = self._decoder.push(self._bytes_of(token.token))
            self._num_characters += len(decoded)
            shown, is_stopped = decoded, False
            if self.num_tokens > self._min_tokens:  # a stop string counts only when all of it comes afterwards
                shown, is_stopped = self._matcher.push(decoded)
            found = self._find_calls(shown)
            text += found.text
            calls += found.calls
            if is_stopped or self._has_its_call:
                return self._last_piece(Found(text, calls), "stop", details, token_ids)
        return Piece(self._index, text, tuple(details), None, tuple(token_ids), self.num_tokens, tuple(calls))

    def finish(self, reason: FinishReason) -> Piece:
        """Return the last piece: what was held back, since no more will come."""
        shown, is_stopped = self._matcher.push(self._decoder.flush())
        if not is_stopped:
            shown += self._matcher.flush()
        return self._last_piece(self._find_calls(shown), "stop" if is_stopped else reason)

    @property
    def _has_its_call(self) -> bool:
        return self._expected is not None and self._expected.is_single and bool(self._calls)

    def _find_calls(self, text: str) -> Found:
        found = Found(text) if self._parser is None else self._parser.push(text)
        return self._note(found)

    def _note(self, found: Found) -> Found:
        """Remember the calls; of an answer that is to have a single one, nothing behind it."""
        if self._expected is not None and self._expected.is_single:
            found = Found("" if self._calls else found.text, [] if self._calls else found.calls[:1])
        self._calls += found.calls
        return found

    def _last_piece(
        self,
        found: Found,
        reason: FinishReason,
        details: Sequence[TokenDetail] = (),
        token_ids: Sequence[int] = (),
    ) -> Piece:
        rest = Found() if self._parser is None else self._note(self._parser.finish())
        return Piece(
            self._index,
            found.text + rest.text,
            tuple(details),
            "tool_calls" if reason == "stop" and self._calls else reason,
            tuple(token_ids),
            self.num_tokens,
            (*found.calls, *rest.calls),
        )

    def _bytes_of(self, token: int) -> bytes:
        if token in self._hidden_ids:
            return b""
        data = self._tokenizer.token_bytes(token)
        is_hidden = self._skip_special_tokens and self._tokenizer.is_special(token)
        return b"" if is_hidden and data not in self._shown_names else data
