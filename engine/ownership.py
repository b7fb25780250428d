"""Which router asked for what, so that one worker can serve several. Pure.

Owned by engine/control.py. Ids of requests and probes are random and made by routers, so each has one owner: what is
said about it goes there alone, and it goes when its owner does. Bounded by what the worker's core holds: an id that the
core has forgotten is forgotten here, a little later.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..cluster.protocol.messages import (
    Busy,
    Failed,
    FirstToken,
    Granted,
    GrantRequest,
    Handback,
    Message,
    PassesTimed,
    Prefill,
    PromptScores,
    TimePasses,
    TimeTransfer,
    Tokens,
    TransferTimed,
)

NUM_FORGOTTEN = 256  # so many ids that the core has forgotten may stay, beside as many as it holds


@dataclass(frozen=True)
class Orphaned:
    """Nobody wants these requests and probes any more: the router that asked for them is gone, or has dropped them."""

    request_ids: frozenset[str]


class Ownership:
    def __init__(self) -> None:
        self.num_ownerless = 0  # messages that nobody waited for any more
        self._owners: dict[str, int] = {}
        self._max_owners = NUM_FORGOTTEN

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, message: Message, router: int) -> None:
        """`router` said `message`: what it asks for belongs to it."""
        match message:
            case GrantRequest() | Prefill():
                self._owners.setdefault(message.request_id, router)
            case TimePasses() | TimeTransfer():
                self._owners.setdefault(message.probe_id, router)
            case _:
                pass

    def orphan(self, router: int) -> Orphaned:
        """Forget everything that `router` asked for, and return it."""
        orphaned = Orphaned(frozenset(key for key, owner in self._owners.items() if owner == router))
        for request_id in orphaned.request_ids:
            del self._owners[request_id]
        return orphaned

    def prune(self, held: Callable[[], Collection[str]]) -> None:
        """Forget what is not among `held`; asks for it only when enough may have been forgotten to make it worth it."""
        if len(self._owners) <= self._max_owners:
            return
        ids = held()
        self._owners = {request_id: owner for request_id, owner in self._owners.items() if request_id in ids}
        self._max_owners = 2 * len(self._owners) + NUM_FORGOTTEN

    def addressed(self, message: Message) -> list[tuple[int, Message]]:
        """Return which router gets what of `message`: each its own sequences, nobody what nobody owns."""
        match message:
            case Tokens():
                return self._split(message)
            case Granted() | Busy() | PromptScores() | FirstToken() | Handback() | Failed():
                owner = self._owners.get(message.request_id)
            case PassesTimed() | TransferTimed():
                owner = self._owners.get(message.probe_id)
            case _:
                raise AssertionError(f"{type(message).__name__} is not about a request")
        self.num_ownerless += owner is None
        return [] if owner is None else [(owner, message)]

    def _split(self, message: Tokens) -> list[tuple[int, Message]]:
        owners = [self._owners.get(sequence.request_id) for sequence in message.sequences]
        routers = sorted({owner for owner in owners if owner is not None})
        self.num_ownerless += owners.count(None)
        if len(routers) == 1 and None not in owners:
            return [(routers[0], message)]  # as it is: this happens every step
        shares = {
            router: tuple(s for s, owner in zip(message.sequences, owners, strict=True) if owner == router)
            for router in routers
        }
        return [(router, message.model_copy(update={"sequences": share})) for router, share in shares.items()]
