"""Which pair of workers gets the next request, and what each is charged with until it reports. Pure.

A pair is a PROMPT worker (least predicted wait, by measured costs where there are some, else by its observed rate)
and a COMPLETION worker (fewest sequences among those with enough free blocks). A worker that has just come is empty,
and would draw everything to itself before it has shown that it works: it starts slowly, unless nobody else has room.
The order is the fair queue's, and strict: while the next request has no room nobody overtakes it, not even another
caller's smaller one, which would take the very blocks that it waits for; so nobody starves.
The router's dispatcher and the simulator in `cluster.sizing` both place requests through this class, which knows no
messages.
"""

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from ..cluster.costs import CostModel
from ..cluster.protocol.identity import WorkerId
from ..engine.block_pool import blocks_for
from ..engine.prefill_scheduler import PrefillRate
from .admission import BlockRoom
from .fair_queue import FairQueue, Ticket
from .rates import BusyRate

BUSY_PAUSE_S = 0.1
LEARNING = 0.3  # weight of the latest observation
# Between several callers, what a worker has still to do when it is given more: enough to be busy until the next grant,
# and no more, because what a worker has goes before whoever comes next.
LEAST_AHEAD_S, MOST_AHEAD_S = 0.03, 0.2
PREFILL_WINDOW_S = 2.0
RAMP_S = 10.0  # after which a new worker is like any other
FIRST_SHARE = 0.1


@dataclass
class PromptView:
    """What the router knows of one PROMPT worker."""

    worker: WorkerId
    max_num_batched_tokens: int
    rate: PrefillRate = field(default_factory=PrefillRate)
    cost: CostModel | None = None  # measured on workers like this one
    joined_s: float = -math.inf
    slowdown: float = 1.0  # how many times longer prefills take than the costs say
    backlog: dict[str, int] = field(default_factory=dict[str, int])  # request → tokens it has yet to prefill
    pace: BusyRate = field(default_factory=lambda: BusyRate(PREFILL_WINDOW_S))  # tokens, of prompts that share steps
    turn: int = 0  # when it was last chosen; among equals whoever was not for longest is next
    progressed_s: float = 0.0  # when it last began or ended a prompt, as far as is known

    @property
    def predicted_wait_s(self) -> float:
        return sum(self._prefill_s(num_tokens) for num_tokens in self.backlog.values())

    def burden_s(self, num_tokens: int, share: float) -> float:
        """Return the predicted wait of a prompt of `num_tokens`; that of who has a small share looks longer."""
        own_s = self._prefill_s(num_tokens)
        return (self.predicted_wait_s + own_s) / share - own_s

    def _prefill_s(self, num_tokens: int) -> float:
        if self.cost is None:
            return num_tokens / self.rate.tokens_per_s
        return self.slowdown * self.cost.sent_pass_s([(0, num_tokens)])

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Learn from a prefill that has ended."""
        self.rate.observe(num_tokens, duration_s)
        expected_s = self.cost.sent_pass_s([(0, num_tokens)]) if self.cost is not None else 0.0
        if expected_s > 0 and duration_s > 0:
            self.slowdown += LEARNING * (duration_s / expected_s - self.slowdown)

    def has_room(self, now: float, ahead_s: float | None) -> bool:
        """A step's worth of tokens may wait behind the one that runs; with `ahead_s`, all must end within that."""
        num_tokens, rate = sum(self.backlog.values()), self.pace.per_s
        if num_tokens >= 2 * self.max_num_batched_tokens:
            return False
        if ahead_s is None or rate is None or num_tokens == 0:
            return True
        return num_tokens / rate - (now - self.progressed_s) < ahead_s

    def charge(self, request_id: str, num_tokens: int, now: float) -> None:
        if not self.backlog:
            self.progressed_s = now
            self.pace.observe(0, now, is_busy=True)
        self.backlog[request_id] = num_tokens

    def uncharge(self, request_id: str, now: float, is_done: bool = False) -> None:
        """`is_done`: the prompt was computed. An unknown request is fine."""
        num_tokens = self.backlog.pop(request_id, None)
        if num_tokens is not None:
            self.pace.observe(num_tokens if is_done else 0, now, is_busy=bool(self.backlog))
            self.progressed_s = now


@dataclass
class CompletionView:
    """What the router knows of one COMPLETION worker."""

    worker: WorkerId
    num_blocks: int
    block_size: int
    max_num_seqs: int
    num_free_blocks: int
    asked_blocks: dict[str, int] = field(default_factory=dict[str, int])  # grants not answered yet
    requests: set[str] = field(default_factory=set[str])
    busy_until_s: float = 0.0
    joined_s: float = -math.inf
    turn: int = 0

    def burden(self, share: float) -> float:
        """Return its sequences; who has a small share looks fuller than it is."""
        return (len(self.requests) + 1) / share - 1

    def num_needed(self, num_tokens: int) -> int:
        return blocks_for(num_tokens + 1, self.block_size)

    @property
    def num_left(self) -> int:
        """Blocks for new requests: each running one may need another soon."""
        return self.num_free_blocks - sum(self.asked_blocks.values()) - len(self.requests)

    def has_room(self, num_tokens: int, now: float) -> bool:
        num_left = self.num_left
        is_empty = not self.requests and num_left == self.num_blocks
        fits = self.num_needed(num_tokens) <= num_left or is_empty
        return fits and len(self.requests) < self.max_num_seqs and now >= self.busy_until_s


def shares(views: Iterable[PromptView] | Iterable[CompletionView], now: float) -> dict[WorkerId, float]:
    """Return how much of its part each gets: a new one less, as long as there are others."""
    ramped = {view.worker: min(1.0, max(FIRST_SHARE, (now - view.joined_s) / RAMP_S)) for view in views}
    most = max(ramped.values(), default=1.0)
    return {worker: share / most for worker, share in ramped.items()}


Pairs = Set[tuple[WorkerId, WorkerId]]


class Placement:
    def __init__(self) -> None:
        self.queue = FairQueue()
        self._prompts: dict[WorkerId, PromptView] = {}
        self._completions: dict[WorkerId, CompletionView] = {}
        self.suspects: frozenset[WorkerId] = frozenset()  # they get nothing new
        self._num_turns = 0
        self._grant_s = LEAST_AHEAD_S  # how long it takes to ask for a grant

    @property
    def num_queued(self) -> int:
        return len(self.queue)

    @property
    def is_complete(self) -> bool:
        """Both pools have a worker."""
        return bool(self._prompts and self._completions)

    @property
    def prompt_workers(self) -> list[WorkerId]:
        return list(self._prompts)

    def charged(self) -> set[str]:
        """Return the requests that some worker is charged with."""
        views = self._completions.values()
        return {request_id for prompt in self._prompts.values() for request_id in prompt.backlog}.union(
            *(view.requests for view in views), *(view.asked_blocks for view in views)
        )

    def add_prompt(
        self,
        worker: WorkerId,
        max_num_batched_tokens: int,
        cost: CostModel | None = None,
        joined_s: float = -math.inf,
    ) -> None:
        """`joined_s`: when it came; without it, it has always been there."""
        self._prompts[worker] = PromptView(worker, max_num_batched_tokens, cost=cost, joined_s=joined_s)

    def add_completion(
        self, worker: WorkerId, num_blocks: int, block_size: int, max_num_seqs: int, joined_s: float = -math.inf
    ) -> None:
        view = CompletionView(worker, num_blocks, block_size, max_num_seqs, num_blocks, joined_s=joined_s)
        self._completions[worker] = view

    def remove(self, worker: WorkerId) -> None:
        """Forget a worker; its requests are the caller's to withdraw or to enqueue again. An unknown one is fine."""
        self._prompts.pop(worker, None)
        self._completions.pop(worker, None)

    def enqueue(self, ticket: Ticket, now: float) -> None:
        """Queue a request; whoever was charged with it no longer is."""
        self._uncharge(ticket.request_id, now)
        self.queue.add(ticket)

    def forget(self, request_id: str, now: float) -> None:
        """The request has ended, queued or charged as it may be."""
        self._uncharge(request_id, now)
        self.queue.forget(request_id)

    def next(self) -> str | None:
        ticket = self.queue.head()
        return ticket.request_id if ticket is not None else None

    def place_next(
        self, num_tokens: int, now: float, keeper: WorkerId | None = None, failed: Pairs = frozenset()
    ) -> tuple[WorkerId, WorkerId] | None:
        """Charge a pair with the next request, of `num_tokens`; None, and it stays queued, when no pair has room.

        `keeper` has blocks for it already; the `failed` pairs get it only when there is no other with room.
        """
        pair = self._choose_pair(num_tokens, now, keeper, failed)
        if pair is None:
            return None
        prompt, completion = pair
        request_id = self.queue.take().request_id
        prompt.charge(request_id, num_tokens, now)
        self._charge(completion, request_id, num_tokens)
        prompt.turn = self._num_turns
        return prompt.worker, completion.worker

    def place_next_alone(self, num_tokens: int, now: float) -> WorkerId | None:
        """Charge a worker that will both prefill and decode it, chosen as a COMPLETION worker; None as above."""
        completion = self._completion_view(num_tokens, now)
        if completion is None:
            return None
        self._charge(completion, self.queue.take().request_id, num_tokens)
        return completion.worker

    def block_room(self) -> BlockRoom:
        """Return what the queue wants of the COMPLETION pool's blocks, and how many are not spoken for."""
        views = self._completions.values()
        size = max((view.block_size for view in views), default=1)
        num_wanted = self.queue.num_prompt_tokens // size + len(self.queue)
        return BlockRoom(num_wanted, sum(view.num_left for view in views), sum(view.num_blocks for view in views))

    def completion_for(self, num_tokens: int, now: float) -> WorkerId | None:
        """Return the COMPLETION worker that a request of `num_tokens` would get now."""
        view = self._completion_view(num_tokens, now)
        return view.worker if view is not None else None

    def granted(self, request_id: str, completion: WorkerId, took_s: float | None = None) -> None:
        """The blocks asked for are the request's, and no longer among the free ones that its worker reports."""
        self._completions[completion].asked_blocks.pop(request_id, None)
        if took_s is not None:
            self._grant_s += LEARNING * (took_s - self._grant_s)

    @property
    def _ahead_s(self) -> float:
        return min(max(LEAST_AHEAD_S + self._grant_s, 2 * self._grant_s), MOST_AHEAD_S)

    def busy(self, completion: WorkerId, now: float) -> None:
        """A grant was refused: ask this worker for nothing for a moment."""
        self._completions[completion].busy_until_s = now + BUSY_PAUSE_S

    def prefilled(self, request_id: str, prompt: WorkerId | None, now: float) -> PromptView | None:
        """The prompt is computed: it waits no longer. Returns the worker's view if there still is one."""
        view = self._prompts.get(prompt) if prompt else None
        if view is not None:
            view.uncharge(request_id, now, is_done=True)
        return view

    def num_blocks_of(self, completion: WorkerId | None, num_tokens: int) -> int:
        """Return how many blocks a sequence of `num_tokens` has there; 0 when the worker is gone."""
        view = self._completions.get(completion) if completion else None
        return view.num_needed(num_tokens) if view is not None else 0

    def note_free_blocks(self, completion: WorkerId, num_free_blocks: int) -> None:
        view = self._completions.get(completion)
        if view is not None:
            view.num_free_blocks = num_free_blocks

    def _choose_pair(
        self, num_tokens: int, now: float, keeper: WorkerId | None, failed: Pairs
    ) -> tuple[PromptView, CompletionView] | None:
        trusted = [view for view in self._prompts.values() if view.worker not in self.suspects]
        ahead_s = self._ahead_s if self.queue.is_shared(now) else None
        prompts = self._by_burden([view for view in trusted if view.has_room(now, ahead_s)], num_tokens, now)
        is_kept = keeper is not None and keeper in self._completions and keeper not in self.suspects
        kept = [self._completions[keeper]] if keeper is not None and is_kept else None
        completions = kept or self._able_completions(num_tokens, now)
        pairs = [(prompt, completion) for completion in completions for prompt in prompts]
        untried = [pair for pair in pairs if (pair[0].worker, pair[1].worker) not in failed] if failed else pairs
        return next(iter(untried or pairs), None)

    def _by_burden(self, prompts: list[PromptView], num_tokens: int, now: float) -> list[PromptView]:
        share = shares(prompts, now)
        return sorted(prompts, key=lambda v: (v.burden_s(num_tokens, share[v.worker]), v.turn, v.worker))

    def _able_completions(self, num_tokens: int, now: float) -> list[CompletionView]:
        """Return those with room, the best first."""
        trusted = [view for view in self._completions.values() if view.worker not in self.suspects]
        able = [view for view in trusted if view.has_room(num_tokens, now)]
        share = shares(able, now)
        return sorted(able, key=lambda v: (v.burden(share[v.worker]), -v.num_free_blocks, v.turn, v.worker))

    def _completion_view(self, num_tokens: int, now: float) -> CompletionView | None:
        return next(iter(self._able_completions(num_tokens, now)), None)

    def _charge(self, completion: CompletionView, request_id: str, num_tokens: int) -> None:
        self._num_turns += 1
        completion.turn = self._num_turns
        completion.asked_blocks[request_id] = completion.num_needed(num_tokens)
        completion.requests.add(request_id)

    def _uncharge(self, request_id: str, now: float) -> None:
        for prompt in self._prompts.values():
            prompt.uncharge(request_id, now)
        for completion in self._completions.values():
            completion.asked_blocks.pop(request_id, None)
            completion.requests.discard(request_id)
