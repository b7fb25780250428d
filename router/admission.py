"""Who is let in: limits of the queue, predicted waits, and when to come back. Pure.

Knows three rates: what the queue loses a second, what COMPLETION workers free a second, both while somebody waits, and
how long answers are. Until a rate was measured nothing is refused by prediction.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .fair_queue import Account, FairQueue, Ticket
from .generation import Caller, GenerationFailed, GenerationRequest
from .rates import BusyRate

RATE_WINDOW_S = 5.0
LEAST_BUSY_S = 1.0
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
# The share of the blocks that has changed hands before one can tell how fast they do: the first to end are the short.
LEAST_TURNOVER = 0.25
OUTPUT_PRIOR = 64.0  # tokens an answer has, until some have ended
OUTPUT_LEARNING = 0.05


@dataclass(frozen=True)
class AdmissionLimits:
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 << 20
    max_queue_wait_s: float = 60.0


@dataclass(frozen=True)
class BlockRoom:
    """The COMPLETION pool's KV blocks: how many the queue wants, how many are free, and how many there are."""

    num_wanted: int
    num_free: int
    num_all: int


@dataclass(frozen=True)
class Measure:
    """What a queue may be full of: a caller's share of it, and one request's size."""

    share: Callable[[Account], float]
    size: Callable[[Ticket], int]


REQUESTS = Measure(lambda account: account.request_share, lambda ticket: 1)
TOKENS = Measure(lambda account: account.token_share, lambda ticket: ticket.cost)


class Admission:
    def __init__(self, limits: AdmissionLimits, queue: FairQueue) -> None:
        self._limits = limits
        self._queue = queue
        self._tokens = BusyRate(RATE_WINDOW_S, LEAST_BUSY_S)
        self._blocks = BusyRate(RATE_WINDOW_S, LEAST_BUSY_S)
        self._num_freed_blocks = 0
        self._num_freed_ever = 0
        self._mean_output_tokens = OUTPUT_PRIOR

    @property
    def drained_tokens_per_s(self) -> float | None:
        """What the queue loses while somebody waits: prompt tokens and those expected as output."""
        return self._tokens.per_s

    @property
    def freed_blocks_per_s(self) -> float | None:
        return self._blocks.per_s

    def ticket(self, request: GenerationRequest, arrival_order: int) -> Ticket:
        num_output_tokens = min(request.sampling.max_tokens, round(self._mean_output_tokens))
        return Ticket(
            arrival_order,
            request.request_id,
            len(request.token_ids),
            num_output_tokens,
            request.caller,
            request.priority,
        )

    def drained(self, num_tokens: int, now: float, is_waiting: bool) -> None:
        """Requests that cost `num_tokens` have left the queue for workers; `is_waiting`: workers hold others up."""
        self._tokens.observe(num_tokens, now, is_waiting)
        self._blocks.observe(self._num_freed_blocks, now, is_waiting)
        self._num_freed_blocks = 0

    def freed(self, num_blocks: int) -> None:
        """A request has given up its blocks; counts with the next `drained`."""
        self._num_freed_blocks += num_blocks
        self._num_freed_ever += num_blocks

    def answered(self, num_output_tokens: int) -> None:
        self._mean_output_tokens += OUTPUT_LEARNING * (num_output_tokens - self._mean_output_tokens)

    def wait_s(self, ticket: Ticket, room: BlockRoom) -> float | None:
        """Return how long `ticket` would wait, were it queued now; None when nobody can tell."""
        rate, total = self._tokens.per_s, self._queue.num_tokens
        if not len(self._queue):
            return 0.0
        if rate is None:
            return None
        ahead = self._queue.cost_ahead(ticket)
        waits_s = [ahead / rate]
        is_known = self._num_freed_ever >= LEAST_TURNOVER * room.num_all
        if self._blocks.per_s is not None and total and is_known:
            waits_s.append((room.num_wanted * min(ahead / total, 1.0) - room.num_free) / self._blocks.per_s)
        return max(waits_s)

    def full(self, caller: Caller) -> GenerationFailed | None:
        """Return the refusal of whoever has no right to a place in the full queue; needs no prompt."""
        num_queued = len(self._queue)
        if num_queued < self._limits.max_queued_requests or self._victims(caller, 1, 1, REQUESTS):
            return None
        return _refusal(f"{num_queued} requests are waiting already", self._half_drained_s())

    def refusal(self, ticket: Ticket, room: BlockRoom, timeout_s: float) -> GenerationFailed | None:
        """Return why `ticket` would wait for too long."""
        wait_s = self.wait_s(ticket, room)
        limit_s = self._limits.max_queue_wait_s
        if wait_s is None or wait_s <= min(limit_s, timeout_s):
            return None
        why = f"its own limit is {timeout_s:g} s" if timeout_s < limit_s else f"allowed are {limit_s:g} s"
        message = f"This request would wait for about {wait_s:.0f} s before it is begun; {why}"
        return _refusal(message, max(wait_s / 2, wait_s - limit_s))

    def displaced(self, ticket: Ticket) -> list[Ticket] | GenerationFailed:
        """Return who gives up a place to `ticket`, usually nobody; or its refusal.

        Every caller has a right to its share of a full queue: the newest requests go of whoever has most of it, unless
        the one that asks would then have more.
        """
        num_queued, num_tokens = len(self._queue), self._queue.num_tokens
        excess = num_tokens + ticket.cost - self._limits.max_queued_tokens
        victims: list[Ticket] = []
        if num_queued and excess > 0:
            victims = self._victims(ticket.caller, ticket.cost, excess, TOKENS)
            if not victims:
                return _refusal(f"{num_tokens} tokens are waiting already", self._half_drained_s())
        if victims or num_queued < self._limits.max_queued_requests:
            return victims
        return self.full(ticket.caller) or self._victims(ticket.caller, 1, 1, REQUESTS)

    def refused_for(self, victim: Ticket) -> GenerationFailed:
        """Return what is said to somebody who lost a place to `displaced`."""
        message = "The queue is full, and other callers have a right to this request's place"
        return _refusal(message, self._half_drained_s())

    def _victims(self, caller: Caller, size: int, excess: int, measure: Measure) -> list[Ticket]:
        """Return the newest requests of the largest other caller, enough for room; none where that is not fair."""
        largest, own = self._queue.largest(measure.share), self._queue.account(caller)
        if largest is None or largest.caller.name == caller.name:
            return []
        victims: list[Ticket] = []
        num_freed = 0
        for candidate in reversed(largest.tickets):
            victims.append(candidate)
            num_freed += measure.size(candidate)
            if num_freed >= excess:
                break
        is_fair = (
            measure.share(own) + size / caller.weight <= measure.share(largest) - num_freed / largest.caller.weight
        )
        return victims if num_freed >= excess and is_fair else []

    def _half_drained_s(self) -> float | None:
        """By then half of those who wait will have begun: a caller that comes back finds room."""
        rate = self._tokens.per_s
        return None if rate is None else self._queue.num_tokens / rate / 2


def _refusal(message: str, retry_after_s: float | None) -> GenerationFailed:
    bounded = None if retry_after_s is None else min(max(retry_after_s, MIN_RETRY_S), MAX_RETRY_S)
    return GenerationFailed("queue_full", f"{message}; try again later.", bounded)
