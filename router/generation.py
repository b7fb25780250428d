"""What the HTTP side and the dispatching side of the router say to each other: one request in, a stream of events out.

The HTTP side knows text and clients, the dispatching side tokens and workers; this module is all they share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..cluster.metrics import Timeline
from ..cluster.protocol.messages import FinishReason, SampledToken, SamplingParams
from .quotas import NO_QUOTA, Quota


@dataclass(frozen=True)
class Caller:
    """Who asks, for fairness and quotas: a key's name, else the `user` that the client named, else nobody known.

    `weight`: its share of the cluster's tokens against other callers, when there is not enough for all.
    """

    name: str
    weight: float = 1.0
    quota: Quota = NO_QUOTA


ANYBODY = Caller("")


@dataclass(frozen=True)
class GenerationRequest:
    request_id: str  # minted by the router
    token_ids: tuple[int, ...]  # the prompt, never empty
    sampling: SamplingParams
    caller: Caller = ANYBODY
    priority: int = 0  # among the same caller's requests the lowest goes first
    timeout_s: float | None = None  # the client's own; the router's bounds it


@dataclass(frozen=True)
class PromptScored:
    """Prompt tokens from index `position` on with their log-probabilities; all come before the first TokensSent."""

    position: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True)
class TokensSent:
    """Output tokens, in order, each exactly once; `position` is the index of the first of them."""

    position: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True)
class Finished:
    """Terminal. The tokens before it are the whole answer."""

    reason: FinishReason
    timeline: Timeline


FailureCode = Literal[
    "no_worker",
    "queue_full",
    "draining",
    "timeout",
    "worker_failed",
    "too_long",
    "grammar_failed",
    "slow_reader",
    "rate_limited",
]


@dataclass(frozen=True)
class GenerationFailed:
    """Terminal. The request could not be completed; `message` is fit for the client."""

    code: FailureCode
    message: str
    retry_after_s: float | None = None  # when it may go better; None: nobody can say


GenerationEvent = PromptScored | TokensSent | Finished | GenerationFailed
Deliver = Callable[[GenerationEvent], None]  # called on the event loop; never raises


class Backend(Protocol):
    """The dispatching side, as the HTTP side sees it."""

    @property
    def is_ready(self) -> bool:
        """True when at least one compatible PROMPT and COMPLETION worker are alive."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Most tokens (prompt + output) a request may have on the present workers; None before any joined."""
        ...

    def refusal(self, caller: Caller, priority: int) -> GenerationFailed | None:
        """Return why a request of `caller` would be refused now, whatever it asks for: before its prompt is read."""
        ...

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Run `request`; `deliver` gets its events in order, the last of which is its one terminal event.

        A request that is refused at once (queue full, nobody there) has GenerationFailed as its only event, which comes
        before this returns.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more: nothing is delivered from now on. A request that has ended is fine."""
        ...

    def finish(self, request_id: str) -> None:
        """End a request that has sent a token: what it sent is the answer. Its terminal event comes at once."""
        ...

    def status(self) -> dict[str, Any]:
        """JSON-ready: workers with role, state, incarnation, pid, load, counters; queue; recent incidents."""
        ...
