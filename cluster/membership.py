"""Who is alive: from hellos, heartbeats and a clock. Pure.

A member is alive, then suspect (no heartbeat for `suspect_after_s`), then gone (`gone_after_s`). A member whose engine
loop makes no progress is gone as well, busy or not: its heartbeats come from another thread and prove nothing. How long
that may take depends on what it computes at a stretch, which it says itself.
When a connection has closed, whoever is not heard from again is gone as soon as it would be suspect: a process that
dies closes its own, but so does one that reconnects.
Deadlines count only time in which this process itself was running: after a stall of our own nobody is declared dead.
When everybody is silent it is more likely we who are cut off: they get as long as the leases last by which they hold on
to our requests.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from .config import LivenessSpec
from .protocol.identity import WorkerId
from .protocol.messages import Heartbeat, Hello, Load

STRETCH_FACTOR = 3.0  # a machine that is shared may take so much longer for the same

MemberState = Literal["alive", "suspect"]


@dataclass
class Member:
    worker: WorkerId
    hello: Hello
    joined_s: float
    last_seen_s: float
    last_progress_s: float
    progress: int = -1
    longest_stretch_s: float = 0.0
    load: Load | None = None
    state: MemberState = "alive"


@dataclass(frozen=True)
class Joined:
    member: Member


@dataclass(frozen=True)
class Gone:
    worker: WorkerId
    reason: str


class Membership:
    def __init__(self, liveness: LivenessSpec) -> None:
        self._liveness = liveness
        self._members: dict[WorkerId, Member] = {}
        self._last_tick_s: float | None = None
        self._lost_s = -math.inf  # when a connection closed, whosever it was

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def get(self, worker: WorkerId) -> Member | None:
        return self._members.get(worker)

    def mismatch(self, hello: Hello) -> str | None:
        """Return why a worker does not fit the members present (I7), naming both values; None when it does."""
        present = next((m.hello for m in self._members.values()), None)
        if present is None:
            return None
        ours, theirs = _must_agree(present), _must_agree(hello)
        different = [name for name in ours if ours[name] != theirs[name]]
        return "; ".join(f"{name} {theirs[name]!r} where the cluster has {ours[name]!r}" for name in different) or None

    def join(self, worker: WorkerId, hello: Hello, now: float) -> list[Joined | Gone]:
        """Admit a worker that fits. An older incarnation of the same name is thereby gone."""
        if worker in self._members:
            return []  # said twice
        older = [m.worker for m in self._members.values() if m.worker.name == worker.name]
        gone: list[Joined | Gone] = [self.leave(w, "replaced by a new process") for w in older]
        member = Member(worker, hello, now, now, now)
        self._members[worker] = member
        return [*gone, Joined(member)]

    def heartbeat(self, worker: WorkerId, beat: Heartbeat, now: float) -> bool:
        """Account for a heartbeat; False when nobody of that name and incarnation has joined."""
        member = self._members.get(worker)
        if member is None:
            return False
        member.last_seen_s, member.load, member.state = now, beat.load, "alive"
        member.longest_stretch_s = beat.longest_stretch_s
        if beat.progress != member.progress:
            member.progress, member.last_progress_s = beat.progress, now
        return True

    def leave(self, worker: WorkerId, reason: str) -> Gone:
        del self._members[worker]
        return Gone(worker, reason)

    def connection_lost(self, now: float) -> None:
        """A member's connection has closed; it is not known whose."""
        self._lost_s = now

    def tick(self, now: float) -> list[Gone]:
        """Return who is gone since the last call; call it every heartbeat interval or more often."""
        self._forgive_own_stall(now)
        gone: list[Gone] = []
        is_alone = self._is_alone(now)
        for member in list(self._members.values()):
            silent_s = now - member.last_seen_s
            stalled_s = now - member.last_progress_s
            if silent_s >= self._gone_after_s(member, is_alone):
                gone.append(self.leave(member.worker, f"no heartbeat for {silent_s:.1f} s"))
            elif silent_s < self._liveness.suspect_after_s and stalled_s >= self._stalled_after_s(member):
                gone.append(self.leave(member.worker, f"heartbeats without progress for {stalled_s:.1f} s"))
            elif silent_s >= self._liveness.suspect_after_s:
                member.state = "suspect"
        return gone

    def _is_alone(self, now: float) -> bool:
        silent = [now - m.last_seen_s >= self._liveness.suspect_after_s for m in self._members.values()]
        return len(silent) > 1 and all(silent)

    def _gone_after_s(self, member: Member, is_alone: bool) -> float:
        if is_alone:
            return max(self._liveness.gone_after_s, self._liveness.lease_s)
        has_lost = member.last_seen_s <= self._lost_s
        return self._liveness.suspect_after_s if has_lost else self._liveness.gone_after_s

    def _stalled_after_s(self, member: Member) -> float:
        return max(self._liveness.stalled_after_s, STRETCH_FACTOR * member.longest_stretch_s)

    def _forgive_own_stall(self, now: float) -> None:
        stalled_s = now - (now if self._last_tick_s is None else self._last_tick_s)
        self._last_tick_s = now
        if stalled_s > self._liveness.suspect_after_s / 2:
            for member in self._members.values():
                member.last_seen_s = min(now, member.last_seen_s + stalled_s)
                member.last_progress_s = min(now, member.last_progress_s + stalled_s)


def _must_agree(hello: Hello) -> dict[str, Any]:
    return {**hello.identity.model_dump(), "transfer.transport": hello.transport}
