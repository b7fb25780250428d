"""One request, from accepted to its single terminal event. Pure: messages in, commands out, the clock an argument.

    QUEUED ──ask──► GRANTING ──granted──► PREFILLING ──first token──► DECODING ──► ENDED
       ▲               │ busy                 │ lost                     │ lost, handed back
       └───────────────┴──────────────────────┴──────────────────────────┘

Every try is a new attempt; messages of other attempts are not ours and are ignored. Tokens are facts about positions:
whoever reports them, in whatever order, each goes to the client once, in order. A later attempt continues after the
tokens that are known, because sampling depends on nothing but the tokens, the seed and the position.
When a PROMPT worker dies, the COMPLETION worker keeps what it has of the KV for the next attempt (`kept`).
The scores of a prompt are such facts, too, and come before every token: tokens that overtake them are held back.
Knows no queue and no other request; which workers to use is the dispatcher's choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..cluster.metrics import Timeline
from ..cluster.protocol.identity import WorkerId
from ..cluster.protocol.messages import (
    Cancel,
    FinishReason,
    FirstToken,
    Granted,
    GrantRequest,
    Message,
    Prefill,
    PrefillStages,
    PromptScores,
    SampledToken,
    SamplingParams,
    SequenceTokens,
)
from .generation import Finished, GenerationEvent, GenerationFailed, GenerationRequest, PromptScored, TokensSent


class Phase(Enum):
    QUEUED = "queued"
    GRANTING = "granting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True)
class Send:
    worker: WorkerId
    message: Message


@dataclass(frozen=True)
class Emit:
    """Tell the client; a terminal event is the last one of its request."""

    request_id: str
    event: GenerationEvent


RouterCommand = Send | Emit


@dataclass
class Stamps:
    """When what happened, by the router's clock; the ones of the attempt that brought the first token."""

    accepted_s: float
    asked_s: float = 0.0
    granted_s: float = 0.0
    first_token_s: float | None = None
    second_token_s: float | None = None
    last_kv_s: float | None = None
    stages: PrefillStages | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Kept:
    """A lost attempt's KV, as far as it came, on the COMPLETION worker that had granted room for it."""

    worker: WorkerId
    attempt: int


class Lifecycle:
    def __init__(self, request: GenerationRequest, arrival_order: int, now: float, deadline_s: float) -> None:
        self.request = request
        self.arrival_order = arrival_order
        self.deadline_s = deadline_s
        self.phase = Phase.QUEUED
        self.attempt = 0
        self.prompt_worker: WorkerId | None = None
        self.completion_worker: WorkerId | None = None
        self.kept: Kept | None = None  # set only while queued
        self.failed_pairs: set[tuple[WorkerId, WorkerId]] = set()  # where an attempt failed and nobody died
        self.outputs: list[SampledToken] = []
        self.num_failures = 0
        self.num_preemptions = 0
        self.stamps = Stamps(accepted_s=now)
        self.asked_s = self._granted_s = now  # of the present attempt
        self._num_cached_tokens = 0
        self._completion_has_reported = False
        self._completion_has_ended = False  # it has reported the last token, and holds nothing any more
        self._num_scored = 1  # prompt tokens whose score is known; nothing is said of the first
        self._held: list[tuple[SequenceTokens, float]] = []  # reports that came before the last score, and when

    @property
    def key(self) -> tuple[str, int]:
        return (self.request.request_id, self.attempt)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What an attempt that starts now has to prefill."""
        return (*self.request.token_ids, *(output.token for output in self.outputs))

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) + len(self.outputs)

    @property
    def is_scored(self) -> bool:
        """No score of the prompt is missing; so it is when none was asked for."""
        return not self.request.sampling.scores_prompt or self._num_scored == len(self.request.token_ids)

    @property
    def is_running(self) -> bool:
        """A PROMPT worker has been given the present attempt."""
        return self.phase in (Phase.PREFILLING, Phase.DECODING)

    def ask(self, prompt_worker: WorkerId, completion_worker: WorkerId, now: float) -> list[RouterCommand]:
        """Begin a new attempt on this pair. Where KV of the last one is kept, it goes on from that."""
        assert self.phase is Phase.QUEUED
        is_resumed = self.kept is not None and self.kept.worker == completion_worker
        resumed_attempt = self.kept.attempt if self.kept is not None and is_resumed else 0
        commands = [] if is_resumed else self._drop_kept()
        self.phase, self.kept = Phase.GRANTING, None
        self.attempt += 1
        self.prompt_worker, self.completion_worker = prompt_worker, completion_worker
        self.asked_s, self._completion_has_reported, self._completion_has_ended = now, False, False
        grant = GrantRequest(
            request_id=self.request.request_id,
            attempt=self.attempt,
            resumed_attempt=resumed_attempt,
            num_output_tokens=len(self.outputs),
            arrival_order=self.arrival_order,
            sampling=_without_scores(self.request.sampling),
            remaining_ms=self._remaining_ms(now),
            token_ids=self.token_ids,
        )
        return [*commands, Send(completion_worker, grant)]

    def granted(self, message: Granted, addresses: tuple[str, ...], now: float) -> list[RouterCommand]:
        """The grant is here: the prompt goes to the PROMPT worker."""
        if self.phase is not Phase.GRANTING:
            return []
        assert self.prompt_worker is not None and self.completion_worker is not None
        self.phase = Phase.PREFILLING
        self._granted_s, self._num_cached_tokens = now, message.num_cached_tokens
        prefill = Prefill(
            request_id=self.request.request_id,
            attempt=self.attempt,
            num_output_tokens=len(self.outputs),
            sampling=_without_scores(self.request.sampling) if self.is_scored else self.request.sampling,
            generation=message.generation,
            credit_bytes=message.credit_bytes,
            num_cached_tokens=message.num_cached_tokens,
            arrived_tokens=message.arrived_tokens,
            receiver=str(self.completion_worker),
            receiver_addresses=addresses,
            remaining_ms=self._remaining_ms(now),
            token_ids=self.token_ids,
        )
        return [Send(self.prompt_worker, prefill)]

    def scored(self, message: PromptScores, now: float) -> list[RouterCommand]:
        """Take what is new of these scores; behind the last of all goes out what was held back."""
        known = self._num_scored
        new = message.tokens[known - message.position :] if message.position <= known else ()
        if not new:
            return []
        self._num_scored += len(new)
        commands: list[RouterCommand] = [Emit(self.request.request_id, PromptScored(known, new))]
        if self.is_scored:
            held, self._held = self._held, []
            for report, received_s in held:
                commands += self._take(report, received_s, now)
        return commands

    def first_token(self, message: FirstToken, now: float) -> list[RouterCommand]:
        if self.phase is Phase.PREFILLING:
            self.phase = Phase.DECODING
        commands = self._accept(message.position, (message.token,), message.stages, now)
        if message.finish_reason is None or self.phase is Phase.ENDED:
            return commands
        # It ended at its first token: the grant was not needed.
        release = self._cancel_completion() if self.completion_worker else []
        return [*commands, *release, *self._finish(message.finish_reason, now)]

    def tokens(self, message: SequenceTokens, now: float) -> list[RouterCommand]:
        """Raises nothing for a gap: tokens that were lost on the way make the attempt a lost one (see `is_gap`)."""
        if self.phase is Phase.PREFILLING:
            self.phase = Phase.DECODING
        self._completion_has_reported = True
        if self.is_scored:
            return self._take(message, now, now)
        self._held.append((message, now))
        self._completion_has_ended = message.finish_reason is not None
        return []

    def _take(self, message: SequenceTokens, received_s: float, now: float) -> list[RouterCommand]:
        stages = message.stages.prefill if message.stages else None
        commands = self._accept(message.position, message.tokens, stages, now)
        if message.stages and self.stamps.first_token_s is not None and self.stamps.last_kv_s is None:
            self.stamps.last_kv_s = received_s - message.stages.since_last_kv_s - self.stamps.first_token_s
        if message.finish_reason is not None and self.phase is not Phase.ENDED:
            commands += self._finish(message.finish_reason, now)
        return commands

    def is_gap(self, message: PromptScores | FirstToken | SequenceTokens) -> bool:
        """True when something before `message` was lost: scores, tokens, or the stages that come with the first."""
        match message:
            case PromptScores():
                return message.position > self._num_scored
            case FirstToken():
                return not self.is_scored
            case SequenceTokens():
                num_known = sum(len(held.tokens) for held, _ in self._held) + len(self.outputs)
                lacks_first = not num_known and not (message.tokens and message.stages)
                return message.position > num_known or lacks_first

    def requeue(self, keeps_kv: bool = False) -> None:
        """The attempt is over without an answer; nobody works on it any more, or has been told to stop.

        `keeps_kv`: its PROMPT worker died, and the COMPLETION worker was not told to stop: it may have some of the KV.
        """
        assert self.phase is not Phase.ENDED
        assert not keeps_kv or self.completion_worker is not None
        self.kept = Kept(self.completion_worker, self.attempt) if keeps_kv and self.completion_worker else None
        self.phase = Phase.QUEUED
        self.prompt_worker = self.completion_worker = None
        self._held.clear()  # the next attempt chooses the same tokens again

    def stop_workers(self, lost: WorkerId | None = None) -> list[RouterCommand]:
        """Return the Cancels that end the present attempt; `lost` is dead and needs none."""
        commands = self._drop_kept(lost)
        if (self._may_be_sending or self._awaits_scores) and self.prompt_worker not in (None, lost):
            commands += self._cancel_prompt()
        if self.phase is not Phase.QUEUED and self.completion_worker not in (None, lost):
            commands += self._cancel_completion(lost)
        return commands

    def fail(self, failure: GenerationFailed) -> list[RouterCommand]:
        """End with an error. Workers must have been stopped before."""
        return self._end(failure)

    def finish(self, now: float) -> list[RouterCommand]:
        """The reader has the whole answer, because its text holds a stop string: stop the workers, and end well."""
        return [*self.stop_workers(), *self._finish("stop", now)]

    def cancel(self) -> list[RouterCommand]:
        """The client is gone: stop the workers; there is nobody to tell."""
        commands = self.stop_workers()
        self.phase = Phase.ENDED
        return commands

    def holders(self) -> list[WorkerId]:
        """Who must hold this attempt now, and be renewed."""
        match self.phase:
            case Phase.GRANTING:
                held = [self.completion_worker]
            case Phase.PREFILLING:
                held = [self.prompt_worker, self.completion_worker]
            case Phase.DECODING:
                held = [self.prompt_worker] if self._awaits_scores else []
                held += [] if self._completion_has_ended else [self.completion_worker]
            case _:
                held = [self.kept.worker] if self.kept is not None else []
        return [worker for worker in held if worker is not None]

    def depends_on(self, worker: WorkerId) -> bool:
        """True when the death of `worker` ends this attempt; a PROMPT worker may have KV to send after its report."""
        return worker in self.holders() or (self._may_be_sending and worker == self.prompt_worker)

    def note_failed_pair(self) -> None:
        """The present attempt failed although nobody died: perhaps these two cannot reach each other."""
        if self.prompt_worker is not None and self.completion_worker is not None:
            self.failed_pairs.add((self.prompt_worker, self.completion_worker))

    def can_keep_kv(self, lost: WorkerId | None) -> bool:
        """True when `lost` is the PROMPT worker, and the COMPLETION worker may have got something from it."""
        has_grant = self.is_running and self.completion_worker is not None
        return has_grant and lost is not None and lost == self.prompt_worker and self._may_be_sending

    def is_kept_on(self, worker: WorkerId) -> bool:
        """True when this request waits, and what it has on `worker` is only kept: its loss ends no attempt."""
        return self.kept is not None and self.kept.worker == worker

    @property
    def _may_be_sending(self) -> bool:
        """KV may still be on its way: until the COMPLETION worker has reported a token, it may lack some."""
        return self.is_running and not self._completion_has_reported

    @property
    def _awaits_scores(self) -> bool:
        return self.is_running and not self.is_scored

    def _accept(
        self, position: int, tokens: Sequence[SampledToken], stages: PrefillStages | None, now: float
    ) -> list[RouterCommand]:
        known = len(self.outputs)
        new = tuple(tokens[known - position :]) if position <= known else ()
        if known == 0 and new:
            self._stamp_first_token(stages, now)
        if self.stamps.second_token_s is None and known + len(new) >= 2 and self.stamps.first_token_s is not None:
            self.stamps.second_token_s = now - self.stamps.first_token_s
        if not new:
            return []
        self.outputs.extend(new)
        return [Emit(self.request.request_id, TokensSent(known, new))]

    def _stamp_first_token(self, stages: PrefillStages | None, now: float) -> None:
        stamps = self.stamps
        stamps.asked_s, stamps.granted_s, stamps.first_token_s = self.asked_s, self._granted_s, now
        stamps.stages, stamps.num_cached_tokens = stages, self._num_cached_tokens

    def _finish(self, reason: FinishReason, now: float) -> list[RouterCommand]:
        return self._end(Finished(reason, self._timeline(now)))

    def _end(self, event: GenerationEvent) -> list[RouterCommand]:
        assert self.phase is not Phase.ENDED, "a request ends once"
        self.phase = Phase.ENDED
        return [Emit(self.request.request_id, event)]

    def _remaining_ms(self, now: float) -> int:
        return max(math.ceil(1000.0 * (self.deadline_s - now)), 0)

    def _drop_kept(self, lost: WorkerId | None = None) -> list[RouterCommand]:
        """The KV of the lost attempt is of no use any more; its sender is dead."""
        kept, self.kept = self.kept, None
        if kept is None or kept.worker == lost:
            return []
        return [Send(kept.worker, Cancel(request_id=self.request.request_id, attempt=kept.attempt))]

    def _cancel_prompt(self) -> list[RouterCommand]:
        assert self.prompt_worker is not None
        return [Send(self.prompt_worker, Cancel(request_id=self.request.request_id, attempt=self.attempt))]

    def _cancel_completion(self, lost: WorkerId | None = None) -> list[RouterCommand]:
        assert self.completion_worker is not None
        is_active = self._may_be_sending and self.prompt_worker != lost
        cancel = Cancel(request_id=self.request.request_id, attempt=self.attempt, sender_is_active=is_active)
        return [Send(self.completion_worker, cancel)]

    def _timeline(self, now: float) -> Timeline:
        stamps, stages = self.stamps, self.stamps.stages
        assert stamps.first_token_s is not None and stages is not None
        queue_s, grant_s = stamps.asked_s - stamps.accepted_s, stamps.granted_s - stamps.asked_s
        ttft_s = stamps.first_token_s - stamps.accepted_s
        return Timeline(
            queue_s=queue_s,
            grant_s=grant_s,
            prefill_queue_s=stages.queue_s,
            prefill_s=stages.prefill_s,
            return_s=ttft_s - queue_s - grant_s - stages.queue_s - stages.prefill_s,
            num_prompt_tokens=len(self.request.token_ids),
            num_output_tokens=len(self.outputs),
            num_cached_tokens=stamps.num_cached_tokens,
            num_attempts=self.num_failures + 1,
            num_preemptions=self.num_preemptions,
            num_kv_bytes=stages.num_kv_bytes,
            num_kv_bytes_arrived=stages.num_kv_bytes_arrived,
            last_kv_s=stamps.last_kv_s,
            second_token_s=stamps.second_token_s,
            end_s=now - stamps.accepted_s,
        )


def _without_scores(sampling: SamplingParams) -> SamplingParams:
    """Scores are made once, by a PROMPT worker: a COMPLETION worker and later attempts need not know of them."""
    return sampling.model_copy(update={"scores_prompt": False}) if sampling.scores_prompt else sampling
