"""Which request runs where, and when. Pure: events in, commands out, the clock an argument.

Requests wait here until a pair of workers has room: a request inside a worker's queue can no longer be moved. Who is
let in, `admission` and `quotas` know; who goes next, `fair_queue`; to which pair, `placement`. Lost attempts return to
the queue's front. Whoever has ended, cancelled or past its deadline, is never begun.
"""

from dataclasses import dataclass

from ..cluster.costs import CostModel
from ..cluster.protocol.identity import WorkerId
from ..cluster.protocol.messages import (
    Busy,
    Failed,
    FirstToken,
    Granted,
    Handback,
    Hello,
    Load,
    Message,
    PeerGone,
    PromptScores,
    SequenceTokens,
    Tokens,
    Unknown,
)
from .admission import Admission, AdmissionLimits
from .fair_queue import Ticket
from .generation import Caller, FailureCode, GenerationFailed, GenerationRequest
from .lifecycle import Emit, Lifecycle, Phase, RouterCommand, Send
from .placement import Placement
from .quotas import QuotaExceeded, Quotas
from .renewals import renewals


@dataclass(frozen=True)
class DispatchLimits:
    admission: AdmissionLimits
    request_timeout_s: float
    max_attempts: int  # worker failures one request survives, plus one
    no_worker_grace_s: float  # how long accepted requests wait for a pool that is empty
    renew_s: float
    answer_s: float  # how long a COMPLETION worker may take to answer a GrantRequest


@dataclass
class DispatchCounts:
    """How often what went otherwise than planned, since the router began; each is a metric."""

    num_retries: int = 0
    num_preemptions: int = 0
    num_busy: int = 0


class Dispatcher:
    def __init__(self, limits: DispatchLimits) -> None:
        self._limits = limits
        self.counts = DispatchCounts()
        self._requests: dict[str, Lifecycle] = {}
        self._tickets: dict[str, Ticket] = {}
        self._placement = Placement()
        self._admission = Admission(limits.admission, self._placement.queue)
        self._quotas = Quotas()
        self._hellos: dict[WorkerId, Hello] = {}
        self._num_arrived = 0
        self._renewed_s = 0.0
        self._incomplete_since_s = 0.0

    @property
    def num_queued(self) -> int:
        return self._placement.num_queued

    @property
    def num_queued_tokens(self) -> int:
        """What the waiting requests have to prefill."""
        return self._placement.queue.num_prompt_tokens

    @property
    def num_running(self) -> int:
        return len(self._requests) - self.num_queued

    @property
    def is_complete(self) -> bool:
        """Both pools have a worker."""
        return self._placement.is_complete

    @property
    def suspects(self) -> frozenset[WorkerId]:
        """Workers that get nothing new."""
        return self._placement.suspects

    @suspects.setter
    def suspects(self, suspects: frozenset[WorkerId]) -> None:
        self._placement.suspects = suspects

    @property
    def max_model_len(self) -> int | None:
        """Most tokens a request may have on every present worker; None while a pool is empty."""
        if not self.is_complete:
            return None
        return min(min(h.max_model_len, h.num_blocks * h.block_size) for h in self._hellos.values())

    @property
    def admission(self) -> Admission:
        """To be read: what is measured of the queue."""
        return self._admission

    def refusal(self, caller: Caller, priority: int, now: float) -> GenerationFailed | None:
        """Return why a request of `caller` would be refused now, whatever its prompt: cheap, to be asked first."""
        if not self.is_complete:
            return self._nobody_there("No worker is available; try again later.")
        exceeded = self._quotas.exceeded(caller.name, caller.quota, 0, now)
        if exceeded is not None:
            return _rate_limited(exceeded)
        least = Ticket(self._num_arrived, "", caller=caller, priority=priority)
        late = self._admission.refusal(least, self._placement.block_room(), self._limits.request_timeout_s)
        return late if late is not None else self._admission.full(caller)

    def submit(self, request: GenerationRequest, now: float) -> list[RouterCommand]:
        timeout_s = min(self._limits.request_timeout_s, request.timeout_s or self._limits.request_timeout_s)
        lifecycle = Lifecycle(request, self._num_arrived, now, now + timeout_s)
        ticket = self._admission.ticket(request, lifecycle.arrival_order)
        displaced = self._admit(ticket, timeout_s, now)
        if isinstance(displaced, GenerationFailed):
            return [Emit(request.request_id, displaced)]
        commands = [command for victim in displaced for command in self._displace(victim, now)]
        self._num_arrived += 1
        self._requests[request.request_id] = lifecycle
        self._tickets[request.request_id] = ticket
        self._placement.queue.note_caller(request.caller, now)
        self._quotas.begin(request.caller.name, request.caller.quota, len(request.token_ids), now)
        self._placement.enqueue(ticket, now)
        return commands + self._dispatch(now)

    def cancel(self, request_id: str, now: float) -> list[RouterCommand]:
        """The client is gone. An unknown or ended request is fine."""
        lifecycle = self._requests.get(request_id)
        if lifecycle is None:
            return []
        commands = lifecycle.cancel()
        self._forget(lifecycle, now)
        return commands + self._dispatch(now)

    def finish(self, request_id: str, now: float) -> list[RouterCommand]:
        """The reader needs no more tokens. Of an ended request the terminal event is on its way already."""
        lifecycle = self._requests.get(request_id)
        if lifecycle is None:
            return []
        return self._settled(lifecycle, lifecycle.finish(now), now) + self._dispatch(now)

    def worker_joined(
        self, worker: WorkerId, hello: Hello, now: float, cost: CostModel | None = None
    ) -> list[RouterCommand]:
        """`cost`: what was measured on workers like this one, if anything was."""
        self._hellos[worker] = hello
        if hello.role == "PROMPT":
            self._placement.add_prompt(worker, hello.max_num_batched_tokens, cost, now)
        else:
            self._placement.add_completion(worker, hello.num_blocks, hello.block_size, hello.max_num_seqs, now)
        return self._dispatch(now)

    def worker_gone(self, worker: WorkerId, now: float) -> list[RouterCommand]:
        """Move everything that ran on `worker` elsewhere."""
        was_complete = self.is_complete
        self._placement.remove(worker)
        hello = self._hellos.pop(worker, None)
        commands: list[RouterCommand] = []
        if hello is not None and hello.role == "COMPLETION":
            commands += [Send(prompt, PeerGone(worker=str(worker))) for prompt in self._placement.prompt_workers]
        if was_complete and not self.is_complete:
            self._incomplete_since_s = now
        for lifecycle in [lc for lc in self._requests.values() if lc.depends_on(worker)]:
            if lifecycle.is_kept_on(worker):
                lifecycle.kept = None
            else:
                commands += self._lose(lifecycle, f"{worker.name} died", now, lost=worker)
        return commands + self._dispatch(now)

    def is_idle(self, worker: WorkerId) -> bool:
        """Nothing runs on `worker`, and nothing is about to."""
        return not any(
            lc.depends_on(worker) or (lc.phase is Phase.GRANTING and lc.prompt_worker == worker)
            for lc in self._requests.values()
        )

    def load_reported(self, worker: WorkerId, load: Load) -> None:
        self._placement.note_free_blocks(worker, load.num_free_blocks)

    def on_message(self, worker: WorkerId, message: Message, now: float) -> list[RouterCommand]:
        """Handle a message of a worker that has joined."""
        self._note_free_blocks(worker, message)
        match message:
            case Tokens():
                commands = [c for tokens in message.sequences for c in self._tokens(tokens, now)]
            case Unknown():
                commands = [c for key in message.requests for c in self._unknown(worker, key, now)]
            case Granted() | Busy() | PromptScores() | FirstToken() | Handback() | Failed():
                commands = self._about_one(worker, message, now)
            case _:
                commands = []
        return commands + self._dispatch(now)

    def tick(self, now: float) -> list[RouterCommand]:
        """Expire what is overdue, renew what is wanted. Call it several times a second."""
        commands: list[RouterCommand] = []
        for lifecycle in [lc for lc in self._requests.values() if now >= lc.deadline_s]:
            commands += self._expire(lifecycle, now)
        for lifecycle in [lc for lc in self._requests.values() if lc.phase is Phase.GRANTING]:
            if now - lifecycle.asked_s >= self._limits.answer_s:
                commands += self._lose(lifecycle, "no answer to a grant request", now)
        if not self.is_complete and now - self._incomplete_since_s >= self._limits.no_worker_grace_s:
            for lifecycle in [lc for lc in self._requests.values() if lc.phase is Phase.QUEUED]:
                commands += self._end(lifecycle, self._nobody_there("No worker is available for this request."), now)
        if now - self._renewed_s >= self._limits.renew_s:
            self._renewed_s = now
            commands += renewals(self._requests.values())
        return commands + self._dispatch(now)

    def check(self) -> None:
        """Assert that queue, requests and views agree."""
        queued = {key for key, lifecycle in self._requests.items() if lifecycle.phase is Phase.QUEUED}
        waiting = {ticket.request_id for ticket in self._placement.queue.tickets}
        assert queued == waiting, "queue and requests differ"
        assert set(self._tickets) == set(self._requests), "a ticket without a request, or a request without one"
        assert self._placement.charged() <= set(self._requests), "a worker is charged for a request that has ended"

    def _about_one(
        self, worker: WorkerId, message: Granted | Busy | PromptScores | FirstToken | Handback | Failed, now: float
    ) -> list[RouterCommand]:
        lifecycle = self._current(message.request_id, message.attempt)
        if lifecycle is None:
            return []
        match message:
            case Granted():
                return self._granted(lifecycle, message, now)
            case Busy():
                return self._busy(lifecycle, now)
            case PromptScores() | FirstToken() if lifecycle.is_gap(message):
                return self._lose(lifecycle, "scores were lost on their way", now) if lifecycle.is_running else []
            case PromptScores():
                return self._settled(lifecycle, lifecycle.scored(message, now), now)
            case FirstToken():
                return self._first_token(lifecycle, message, now)
            case Handback():
                return self._handed_back(lifecycle, now)
            case Failed():
                return self._failed(lifecycle, worker, message, now)

    def _granted(self, lifecycle: Lifecycle, message: Granted, now: float) -> list[RouterCommand]:
        worker = lifecycle.completion_worker
        if worker not in self._hellos or lifecycle.phase is not Phase.GRANTING:
            return []
        self._placement.granted(lifecycle.request.request_id, worker, now - lifecycle.asked_s)
        if now >= lifecycle.deadline_s:
            return self._expire(lifecycle, now)
        if lifecycle.prompt_worker not in self._hellos:
            return self._lose(lifecycle, "its PROMPT worker died", now, lost=lifecycle.prompt_worker)
        return lifecycle.granted(message, self._hellos[worker].data_addresses, now)

    def _busy(self, lifecycle: Lifecycle, now: float) -> list[RouterCommand]:
        worker = lifecycle.completion_worker
        if worker not in self._hellos or lifecycle.phase is not Phase.GRANTING:
            return []
        self.counts.num_busy += 1
        self._placement.busy(worker, now)
        self._requeue(lifecycle, now)
        return []

    def _first_token(self, lifecycle: Lifecycle, message: FirstToken, now: float) -> list[RouterCommand]:
        view = self._placement.prefilled(lifecycle.request.request_id, lifecycle.prompt_worker, now)
        if view is not None:
            view.observe(message.stages.num_computed_tokens, message.stages.prefill_s)
        return self._settled(lifecycle, lifecycle.first_token(message, now), now)

    def _tokens(self, message: SequenceTokens, now: float) -> list[RouterCommand]:
        lifecycle = self._current(message.request_id, message.attempt)
        if lifecycle is None or lifecycle.phase in (Phase.QUEUED, Phase.GRANTING):
            return []
        if lifecycle.is_gap(message):
            return self._lose(lifecycle, "tokens were lost on their way", now)
        self._placement.prefilled(lifecycle.request.request_id, lifecycle.prompt_worker, now)
        return self._settled(lifecycle, lifecycle.tokens(message, now), now)

    def _handed_back(self, lifecycle: Lifecycle, now: float) -> list[RouterCommand]:
        if lifecycle.phase not in (Phase.PREFILLING, Phase.DECODING):
            return []
        lifecycle.num_preemptions += 1
        self.counts.num_preemptions += 1
        self._requeue(lifecycle, now)
        return []

    def _failed(self, lifecycle: Lifecycle, worker: WorkerId, message: Failed, now: float) -> list[RouterCommand]:
        if lifecycle.is_kept_on(worker):
            lifecycle.kept = None
            return []
        if not lifecycle.depends_on(worker):
            return []
        if message.is_expired:
            return self._expire(lifecycle, now)
        if not message.is_retryable:
            code = "too_long" if message.is_too_long else "grammar_failed"
            return self._fail(lifecycle, code, f"The request cannot be served: {message.reason}.", now)
        lifecycle.note_failed_pair()
        return self._lose(lifecycle, message.reason, now)

    def _unknown(self, worker: WorkerId, key: tuple[str, int], now: float) -> list[RouterCommand]:
        lifecycle = self._current(*key)
        if lifecycle is None or worker not in lifecycle.holders():
            return []
        if lifecycle.is_kept_on(worker):
            lifecycle.kept = None
            return []
        return self._lose(lifecycle, f"{worker.name} does not know the request", now)

    def _lose(self, lifecycle: Lifecycle, reason: str, now: float, lost: WorkerId | None = None) -> list[RouterCommand]:
        """An attempt failed: try again where it left off, unless it has failed too often."""
        lifecycle.num_failures += 1
        if lifecycle.num_failures >= self._limits.max_attempts:
            return self._fail(
                lifecycle, "worker_failed", f"The request failed on several workers: {reason}.", now, lost
            )
        self.counts.num_retries += 1
        keeps_kv = lifecycle.can_keep_kv(lost) and lifecycle.completion_worker in self._hellos
        commands = [] if keeps_kv else lifecycle.stop_workers(lost)
        self._requeue(lifecycle, now, keeps_kv)
        return commands

    def _fail(
        self, lifecycle: Lifecycle, code: FailureCode, message: str, now: float, lost: WorkerId | None = None
    ) -> list[RouterCommand]:
        return self._end(lifecycle, GenerationFailed(code, message), now, lost)

    def _end(
        self, lifecycle: Lifecycle, failure: GenerationFailed, now: float, lost: WorkerId | None = None
    ) -> list[RouterCommand]:
        commands = lifecycle.stop_workers(lost) + lifecycle.fail(failure)
        self._forget(lifecycle, now)
        return commands

    def _expire(self, lifecycle: Lifecycle, now: float) -> list[RouterCommand]:
        limit_s = lifecycle.deadline_s - lifecycle.stamps.accepted_s
        return self._fail(lifecycle, "timeout", f"The request did not finish within {limit_s:g} s.", now)

    def _settled(self, lifecycle: Lifecycle, commands: list[RouterCommand], now: float) -> list[RouterCommand]:
        if lifecycle.phase is Phase.ENDED:
            self._admission.answered(len(lifecycle.outputs))
            self._forget(lifecycle, now)
        return commands

    def _requeue(self, lifecycle: Lifecycle, now: float, keeps_kv: bool = False) -> None:
        self._note_freed(lifecycle)
        lifecycle.requeue(keeps_kv)
        self._placement.enqueue(self._tickets[lifecycle.request.request_id], now)

    def _note_freed(self, lifecycle: Lifecycle) -> None:
        self._admission.freed(self._placement.num_blocks_of(lifecycle.completion_worker, lifecycle.num_tokens))

    def _forget(self, lifecycle: Lifecycle, now: float) -> None:
        request = lifecycle.request
        self._note_freed(lifecycle)
        self._quotas.end(request.caller.name, request.caller.quota, len(lifecycle.outputs), now)
        del self._requests[request.request_id], self._tickets[request.request_id]
        self._placement.forget(request.request_id, now)

    def _admit(self, ticket: Ticket, timeout_s: float, now: float) -> list[Ticket] | GenerationFailed:
        """Return who has to give up a place to a new request, or why it is refused."""
        caller, refusal = ticket.caller, self.refusal(ticket.caller, ticket.priority, now)
        if refusal is not None:
            return refusal
        exceeded = self._quotas.exceeded(caller.name, caller.quota, ticket.num_prompt_tokens, now)
        if exceeded is not None:
            return _rate_limited(exceeded)
        late = self._admission.refusal(ticket, self._placement.block_room(), timeout_s)
        return late if late is not None else self._admission.displaced(ticket)

    def _displace(self, victim: Ticket, now: float) -> list[RouterCommand]:
        return self._end(self._requests[victim.request_id], self._admission.refused_for(victim), now)

    def _nobody_there(self, message: str) -> GenerationFailed:
        return GenerationFailed("no_worker", message, retry_after_s=self._limits.no_worker_grace_s)

    @property
    def _is_waiting(self) -> bool:
        """Somebody waits, and for workers that are there."""
        return self.is_complete and self.num_queued > 0

    def dispatch(self, now: float) -> list[RouterCommand]:
        """Time has passed: a worker may be near the end of what it was given. Cheap when there is nothing to do."""
        return self._dispatch(now) if self.num_queued else []

    def _dispatch(self, now: float) -> list[RouterCommand]:
        """Give the next requests to pairs with room."""
        commands: list[RouterCommand] = []
        num_drained = 0
        while (request_id := self._placement.next()) is not None:
            lifecycle = self._requests[request_id]
            if now >= lifecycle.deadline_s:
                commands += self._expire(lifecycle, now)
                continue
            keeper = lifecycle.kept.worker if lifecycle.kept is not None else None
            pair = self._placement.place_next(lifecycle.num_tokens, now, keeper, lifecycle.failed_pairs)
            if pair is None:
                break
            num_drained += self._tickets[request_id].cost if lifecycle.attempt == 0 else 0
            commands += lifecycle.ask(*pair, now)
        self._admission.drained(num_drained, now, self._is_waiting)
        return commands

    def _note_free_blocks(self, worker: WorkerId, message: Message) -> None:
        if isinstance(message, Granted | Busy | Tokens | Handback):
            self._placement.note_free_blocks(worker, message.num_free_blocks)

    def _current(self, request_id: str, attempt: int) -> Lifecycle | None:
        lifecycle = self._requests.get(request_id)
        return lifecycle if lifecycle is not None and lifecycle.attempt == attempt else None


def _rate_limited(exceeded: QuotaExceeded) -> GenerationFailed:
    return GenerationFailed("rate_limited", exceeded.message, exceeded.retry_after_s)
