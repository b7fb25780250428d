"""Who goes next: callers take turns by the tokens they use, and one caller's requests keep their order. Pure.

Deficit round robin with the smallest possible rounds, paid afterwards: a round gives every caller that waits or owes
its weight in tokens, whoever owes least goes, and then owes what its request costs. So backlogged callers are served in
proportion to their weights, to within a request of each, and one that asked for little goes at the next opportunity.
Debts outlive a caller's last queued request, else whoever sends one request at a time would never owe anything; what a
caller leaves unused while others wait is its credit, CREDIT_TOKENS at most, so that a few of its requests may come at
once. Both end when nobody waits. Rounds go on with the work, so that ever new callers, who have no credit, starve none.

A request costs its prompt and the output that is expected of it, a token alike: the pools are sized so that neither
waits for the other. What was taken once is paid for: when it comes back, it goes before everybody, in order of arrival.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .generation import ANYBODY, Caller

CREDIT_TOKENS = 1024
MAX_IDLE_CALLERS = 1024
RECENT_S = 600.0
MAX_RECENT_CALLERS = 4096


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's place in the queue."""

    arrival_order: int
    request_id: str
    num_prompt_tokens: int = 1
    num_output_tokens: int = 0  # expected
    caller: Caller = ANYBODY
    priority: int = 0

    @property
    def cost(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Among those of the same caller."""
        return self.priority, self.arrival_order


@dataclass
class Account:
    """What one caller waits for and owes. `due`: the round by which its debt is paid."""

    caller: Caller
    due: float
    served: int = 0  # the number of its latest turn: of equals, who had none for longest goes
    tickets: list[Ticket] = field(default_factory=list[Ticket])  # sorted
    num_tokens: int = 0

    @property
    def token_share(self) -> float:
        return self.num_tokens / self.caller.weight

    @property
    def request_share(self) -> float:
        return len(self.tickets) / self.caller.weight


class FairQueue:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._returned: list[Ticket] = []  # sorted by arrival
        self._tickets: dict[str, Ticket] = {}
        self._taken: set[str] = set()
        self._round = 0.0
        self._num_turns = 0
        self._num_prompt_tokens = 0
        self._head: Ticket | None = None  # None: not chosen since the last change
        self._seen_s: dict[str, float] = {}  # callers, the latest last

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tickets

    @property
    def tickets(self) -> Iterable[Ticket]:
        return self._tickets.values()

    @property
    def num_tokens(self) -> int:
        """What those who have never been taken cost."""
        return sum(account.num_tokens for account in self._accounts.values())

    @property
    def num_prompt_tokens(self) -> int:
        """What all who wait have to prefill."""
        return self._num_prompt_tokens

    @property
    def num_callers(self) -> int:
        """Those that wait, or owe something."""
        return len(self._accounts)

    def note_caller(self, caller: Caller, now: float) -> None:
        self._seen_s.pop(caller.name, None)
        self._seen_s[caller.name] = now
        if len(self._seen_s) > MAX_RECENT_CALLERS:
            del self._seen_s[next(iter(self._seen_s))]

    def is_shared(self, now: float) -> bool:
        """More than one caller has asked lately."""
        while self._seen_s and now - next(iter(self._seen_s.values())) > RECENT_S:
            del self._seen_s[next(iter(self._seen_s))]
        return len(self._seen_s) > 1

    def add(self, ticket: Ticket) -> None:
        assert ticket.request_id not in self._tickets, "queued twice"
        self._tickets[ticket.request_id] = ticket
        self._num_prompt_tokens += ticket.num_prompt_tokens
        self._head = None
        if ticket.request_id in self._taken:
            insort(self._returned, ticket, key=lambda t: t.arrival_order)
            return
        account = self._accounts.setdefault(ticket.caller.name, self.account(ticket.caller))
        if not account.tickets:
            account.due = self._entry(account)
        account.caller = ticket.caller
        insort(account.tickets, ticket, key=lambda t: t.order)
        account.num_tokens += ticket.cost

    def forget(self, request_id: str) -> None:
        """The request has ended, whether it waits or was taken. An unknown one is fine."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._drop(ticket)
        self._taken.discard(request_id)

    def head(self) -> Ticket | None:
        """Return who goes next; it stays the same until the queue changes."""
        if self._head is None and self._tickets:
            self._head = self._returned[0] if self._returned else self._next_account().tickets[0]
        return self._head

    def take(self) -> Ticket:
        """Remove the head; its caller pays."""
        ticket = self.head()
        assert ticket is not None, "nobody waits"
        if ticket.request_id not in self._taken:
            self._taken.add(ticket.request_id)
            self._charge(self._accounts[ticket.caller.name], ticket.cost)
        self._drop(ticket)
        return ticket

    def cost_ahead(self, ticket: Ticket) -> float:
        """Return what goes before `ticket`, were it added now: its caller's, and of others what they get meanwhile."""
        own = self.account(ticket.caller)
        index = bisect_right(own.tickets, ticket.order, key=lambda t: t.order)
        is_last = index == len(own.tickets)
        own_cost = own.num_tokens if is_last else sum(t.cost for t in own.tickets[:index])
        turn = (own.due if own.tickets else self._entry(own)) + own_cost / ticket.caller.weight
        others = (a for a in self._accounts.values() if a is not own and a.tickets)
        return own_cost + sum(min(a.num_tokens, max(turn - a.due, 0.0) * a.caller.weight) for a in others)

    def largest(self, share: Callable[[Account], float]) -> Account | None:
        """Return the account with the largest share of the queue, of those that wait for a first turn."""
        return max((account for account in self._accounts.values() if account.tickets), key=share, default=None)

    def account(self, caller: Caller) -> Account:
        """Return what `caller` waits for; an empty account when it waits for nothing."""
        return self._accounts.get(caller.name) or Account(caller, self._round)

    def _entry(self, account: Account) -> float:
        """Return the round with which a caller begins to wait: nobody saves up more than a credit."""
        return max(account.due, self._round - CREDIT_TOKENS / account.caller.weight)

    def _next_account(self) -> Account:
        waiting = (account for account in self._accounts.values() if account.tickets)
        return min(waiting, key=lambda account: (account.due, account.served))

    def _charge(self, account: Account, cost: int) -> None:
        account.due += cost / account.caller.weight
        self._num_turns += 1
        account.served = self._num_turns
        active = [a for a in self._accounts.values() if a.tickets or a.due > self._round]
        weight = sum(a.caller.weight for a in active)
        # Where they stand on average: each has had as many rounds, but for its debt or credit.
        self._round = max(self._round, sum(a.due * a.caller.weight for a in active) / weight)
        if len(self._accounts) > 2 * len(self._tickets) + MAX_IDLE_CALLERS:
            kept = {name: a for name, a in self._accounts.items() if a.tickets or a.due > self._round}
            self._accounts = kept

    def _drop(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request_id]
        self._num_prompt_tokens -= ticket.num_prompt_tokens
        self._head = None
        if ticket in self._returned:
            self._returned.remove(ticket)
        else:
            account = self._accounts[ticket.caller.name]
            account.tickets.remove(ticket)
            account.num_tokens -= ticket.cost
        if not self._tickets:
            self._accounts.clear()
            self._round = 0.0
