"""Measurements on live workers: who is asked what, who is under probe, how a probe ends. Pure; the clock an argument.

A probe's life here:
1. It begins when its workers are there, alive, idle and not under another probe; else it ends at once, with the reason.
2. Passes: TimePasses goes to the worker, which answers PassesTimed. A transfer: the COMPLETION worker is asked for a
   grant as for a request, then TimeTransfer goes to the PROMPT worker, which answers TransferTimed.
3. It ends once: with times, or with a refusal when a worker fails it or dies, or when nobody answers in time (I6).
Meanwhile its workers get nothing new (see core.py), so that requests wait and disturb nothing. Knows no requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ..cluster.membership import Member, Membership
from ..cluster.protocol.identity import Role, WorkerId
from ..cluster.protocol.messages import (
    PROBE_ATTEMPT,
    Busy,
    Cancel,
    Failed,
    Granted,
    GrantRequest,
    Message,
    PassesTimed,
    SamplingParams,
    TimePasses,
    TimeTransfer,
    TransferTimed,
)
from .lifecycle import Send

MAX_TOKENS = 2**20  # as many as a token frame holds
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS, strict=True)]


class Question(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    limit_s: float = Field(default=60.0, gt=0, le=3600, strict=True)

    def names(self) -> list[tuple[str, Role | None]]:
        """Return the workers it is about, each with the role that it must have."""
        raise AssertionError("each kind has its own")


class PassesQuestion(Question):
    """How long does this worker take for a pass over these rows, (tokens cached before, tokens to compute)?"""

    worker: str
    rows: tuple[tuple[TokenCount, Annotated[TokenCount, Field(ge=1)]], ...] = Field(min_length=1, max_length=1024)
    num_warmup: int = Field(default=1, ge=0, le=100, strict=True)
    num_repeats: int = Field(default=5, ge=1, le=1000, strict=True)

    def names(self) -> list[tuple[str, Role | None]]:
        return [(self.worker, None)]


class TransferQuestion(Question):
    """How long does the KV of so many tokens take from this PROMPT to this COMPLETION worker?"""

    prompt: str
    completion: str
    num_tokens: int = Field(ge=1, lt=MAX_TOKENS, strict=True)

    def names(self) -> list[tuple[str, Role | None]]:
        return [(self.prompt, "PROMPT"), (self.completion, "COMPLETION")]


@dataclass(frozen=True)
class ProbeRefusal:
    """Why there are no times; `is_retryable` when the same question may be answered a moment later."""

    reason: str
    is_retryable: bool = False


ProbeResult = tuple[float, ...] | ProbeRefusal


@dataclass(frozen=True)
class ProbeEnded:
    """Tell whoever asked; the last word about this probe."""

    probe_id: str
    result: ProbeResult


ProbeCommand = Send | ProbeEnded


@dataclass
class Probe:
    probe_id: str
    question: PassesQuestion | TransferQuestion
    workers: list[Member]  # passes: one; a transfer: PROMPT, then COMPLETION
    deadline_s: float
    is_sending: bool = False  # the PROMPT worker was told to send


class Probes:
    def __init__(self, membership: Membership, is_idle: Callable[[WorkerId], bool], answer_s: float) -> None:
        self._membership = membership
        self._is_idle = is_idle
        self._answer_s = answer_s
        self._probes: dict[str, Probe] = {}

    @property
    def workers(self) -> frozenset[WorkerId]:
        """Who is under probe."""
        return frozenset(member.worker for probe in self._probes.values() for member in probe.workers)

    def begin(self, probe_id: str, question: PassesQuestion | TransferQuestion, now: float) -> list[ProbeCommand]:
        members: list[Member] = []
        for name, role in question.names():
            found = self._find(name, role)
            if isinstance(found, ProbeRefusal):
                return [ProbeEnded(probe_id, found)]
            members.append(found)
        self._probes[probe_id] = Probe(probe_id, question, members, now + question.limit_s + self._answer_s)
        return [Send(members[-1].worker, _opening(probe_id, question))]

    def cancel(self, probe_id: str) -> list[ProbeCommand]:
        """Nobody waits for the result any more. A probe that has ended is fine."""
        probe = self._probes.pop(probe_id, None)
        return [] if probe is None else _stop(probe)

    def on_message(self, worker: WorkerId, message: Message) -> list[ProbeCommand]:
        """Handle a message that may be about a probe; what is not, or comes too late, is ignored."""
        match message:
            case PassesTimed() | TransferTimed():
                probe = self._of(message.probe_id, worker)
            case Granted() | Busy() | Failed():
                probe = self._of(message.request_id, worker)
            case _:
                return []
        return [] if probe is None else self._answered(probe, worker, message)

    def worker_gone(self, worker: WorkerId) -> list[ProbeCommand]:
        hit = [probe for probe in self._probes.values() if any(m.worker == worker for m in probe.workers)]
        return [c for probe in hit for c in self._refuse(probe, f"{worker.name} died meanwhile", stopped=worker)]

    def tick(self, now: float) -> list[ProbeCommand]:
        """End what nobody answered in time. Call it several times a second."""
        late = [probe for probe in self._probes.values() if now >= probe.deadline_s]
        return [
            command
            for probe in late
            for command in self._refuse(probe, f"no answer within {probe.question.limit_s + self._answer_s:g} s")
        ]

    def _find(self, name: str, role: Role | None) -> Member | ProbeRefusal:
        found = [member for member in self._membership.members if member.worker.name == name]
        if not found:
            present = ", ".join(sorted(member.worker.name for member in self._membership.members)) or "none"
            return ProbeRefusal(f"there is no worker {name}; present: {present}")
        member = found[0]
        if role is not None and member.hello.role != role:
            return ProbeRefusal(f"{name} is a {member.hello.role} worker; a {role} worker is needed")
        if member.state != "alive":
            return ProbeRefusal(f"{name} is {member.state}", is_retryable=True)
        if member.worker in self.workers:
            return ProbeRefusal(f"{name} is under another probe", is_retryable=True)
        if not self._is_idle(member.worker):
            return ProbeRefusal(f"{name} serves requests", is_retryable=True)
        return member

    def _of(self, probe_id: str, worker: WorkerId) -> Probe | None:
        probe = self._probes.get(probe_id)
        return probe if probe is not None and any(m.worker == worker for m in probe.workers) else None

    def _answered(self, probe: Probe, worker: WorkerId, message: Message) -> list[ProbeCommand]:
        match message:
            case PassesTimed():
                return self._end(probe, message.pass_s)
            case TransferTimed():
                return [*_stop(probe, stopped=worker), *self._end(probe, (message.transfer_s,))]
            case Granted() if isinstance(probe.question, TransferQuestion) and not probe.is_sending:
                return self._granted(probe, probe.question, message)
            case Busy():
                return self._refuse(probe, f"{worker.name} has no room", is_retryable=True, stopped=worker)
            case Failed():
                reason = f"{worker.name}: {message.reason}"
                return self._refuse(probe, reason, is_retryable=message.is_retryable, stopped=worker)
            case _:
                return []  # a grant delivered twice

    def _granted(self, probe: Probe, question: TransferQuestion, message: Granted) -> list[ProbeCommand]:
        probe.is_sending = True
        prompt, completion = probe.workers
        order = TimeTransfer(
            probe_id=probe.probe_id,
            num_tokens=question.num_tokens,
            generation=message.generation,
            credit_bytes=message.credit_bytes,
            receiver=str(completion.worker),
            receiver_addresses=completion.hello.data_addresses,
        )
        return [Send(prompt.worker, order)]

    def _refuse(
        self, probe: Probe, reason: str, is_retryable: bool = False, stopped: WorkerId | None = None
    ) -> list[ProbeCommand]:
        return [*_stop(probe, stopped), *self._end(probe, ProbeRefusal(reason, is_retryable))]

    def _end(self, probe: Probe, result: ProbeResult) -> list[ProbeCommand]:
        del self._probes[probe.probe_id]
        return [ProbeEnded(probe.probe_id, result)]


def _opening(probe_id: str, question: PassesQuestion | TransferQuestion) -> Message:
    match question:
        case PassesQuestion():
            return TimePasses(
                probe_id=probe_id,
                rows=question.rows,
                num_warmup=question.num_warmup,
                num_repeats=question.num_repeats,
                limit_s=question.limit_s,
            )
        case TransferQuestion():
            return GrantRequest(
                request_id=probe_id,
                attempt=PROBE_ATTEMPT,
                arrival_order=0,
                sampling=SamplingParams(max_tokens=2, temperature=0.0),  # so that the sequence ends by itself
                token_ids=(0,) * question.num_tokens,
            )


def _stop(probe: Probe, stopped: WorkerId | None = None) -> list[ProbeCommand]:
    """Return the Cancels that end the probe on its workers; `stopped` has ended it by itself, or is dead."""
    prompt, receiver = probe.workers[0].worker, probe.workers[-1].worker
    commands: list[ProbeCommand] = []
    is_sending = probe.is_sending and prompt != stopped
    if is_sending:
        commands.append(Send(prompt, Cancel(request_id=probe.probe_id, attempt=PROBE_ATTEMPT)))
    if receiver != stopped:
        cancel = Cancel(request_id=probe.probe_id, attempt=PROBE_ATTEMPT, sender_is_active=is_sending)
        commands.append(Send(receiver, cancel))
    return commands
