"""A dispatcher with workers and clients around it: what tests of the router's decisions drive."""

from typing import Any

from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    Cancel,
    FirstToken,
    Granted,
    GrantRequest,
    Hello,
    KVLayoutInfo,
    Message,
    ModelIdentity,
    PrefillStages,
    SampledToken,
    SamplingParams,
    SequenceTokens,
    Tokens,
)
from twinpool.router.admission import AdmissionLimits
from twinpool.router.dispatch import Dispatcher, DispatchLimits
from twinpool.router.generation import GenerationEvent, GenerationFailed, GenerationRequest, TokensSent
from twinpool.router.lifecycle import Emit, RouterCommand, Send

LIMITS = DispatchLimits(
    AdmissionLimits(max_queued_requests=5),
    request_timeout_s=60.0,
    max_attempts=3,
    no_worker_grace_s=10.0,
    renew_s=1.0,
    answer_s=5.0,
)
P0, P1 = WorkerId("prompt-0", "x"), WorkerId("prompt-1", "x")
D0, D1 = WorkerId("completion-0", "x"), WorkerId("completion-1", "x")
IDENTITY = ModelIdentity(
    model="m",
    fingerprint="f",
    dtype="float32",
    layout=KVLayoutInfo(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"),
)


def hello(role: str, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "role": role,
        "pid": 1,
        "host": "h",
        "identity": IDENTITY,
        "block_size": 4,
        "num_blocks": 100,
        "max_model_len": 1000,
        "max_num_batched_tokens": 50,
        "max_num_seqs": 8,
        "data_addresses": ("tcp://d",) if role == "COMPLETION" else (),
    }
    return Hello(**(fields | changes))


class Router:
    """A dispatcher with workers; remembers what every client got and every worker was sent."""

    def __init__(
        self,
        prompts: tuple[WorkerId, ...] = (P0,),
        completions: tuple[WorkerId, ...] = (D0,),
        limits: DispatchLimits = LIMITS,
        **changes: Any,
    ) -> None:
        self.core = Dispatcher(limits)
        self.now = 0.0
        self.events: dict[str, list[GenerationEvent]] = {}
        self.sent: list[tuple[WorkerId, Message]] = []
        for worker in prompts:
            self.core.worker_joined(worker, hello("PROMPT", **changes), 0.0)
        for worker in completions:
            self.core.worker_joined(worker, hello("COMPLETION", **changes), 0.0)

    def do(self, commands: list[RouterCommand]) -> list[tuple[WorkerId, Message]]:
        new: list[tuple[WorkerId, Message]] = []
        for command in commands:
            match command:
                case Send():
                    new.append((command.worker, command.message))
                case Emit():
                    events = self.events.setdefault(command.request_id, [])
                    assert not events or isinstance(events[-1], TokensSent), "an event after the terminal one (I3)"
                    events.append(command.event)
        self.sent += new
        self.core.check()
        return new

    def submit(self, name: str, length: int = 3, max_tokens: int = 9) -> list[tuple[WorkerId, Message]]:
        request = GenerationRequest(name, tuple(range(length)), SamplingParams(max_tokens=max_tokens))
        return self.do(self.core.submit(request, self.now))

    def gets(self, worker: WorkerId, message: Message) -> list[tuple[WorkerId, Message]]:
        return self.do(self.core.on_message(worker, message, self.now))

    def tick(self, now: float) -> list[tuple[WorkerId, Message]]:
        self.now = now
        return self.do(self.core.tick(now))

    def grant(
        self, name: str, worker: WorkerId = D0, attempt: int = 1, free: int = 90
    ) -> list[tuple[WorkerId, Message]]:
        message = Granted(request_id=name, attempt=attempt, generation=5, credit_bytes=9, num_free_blocks=free)
        return self.gets(worker, message)

    def first(
        self, name: str, worker: WorkerId = P0, attempt: int = 1, **changes: Any
    ) -> list[tuple[WorkerId, Message]]:
        fields: dict[str, Any] = {"position": 0, "token": SampledToken(token=100), "stages": stages()}
        return self.gets(worker, FirstToken(request_id=name, attempt=attempt, **(fields | changes)))

    def tokens(
        self, name: str, position: int, number: int, worker: WorkerId = D0, attempt: int = 1, **changes: Any
    ) -> list[tuple[WorkerId, Message]]:
        new = tuple(SampledToken(token=100 + position + i) for i in range(number))
        each = SequenceTokens(request_id=name, attempt=attempt, position=position, tokens=new, **changes)
        return self.gets(worker, Tokens(sequences=(each,), num_free_blocks=90))

    def running(self, name: str, **how: Any) -> None:
        """Bring a new request to the phase where both have reported."""
        self.submit(name, **how)
        self.grant(name)
        self.first(name)
        self.tokens(name, 1, 1)

    def outputs(self, name: str) -> list[int]:
        return [t.token for e in self.events.get(name, []) if isinstance(e, TokensSent) for t in e.tokens]

    def end(self, name: str) -> GenerationEvent | None:
        events = self.events.get(name, [])
        return events[-1] if events and not isinstance(events[-1], TokensSent) else None


def stages(num_computed_tokens: int = 3, prefill_s: float = 1.0) -> PrefillStages:
    return PrefillStages(
        queue_s=0, prefill_s=prefill_s, num_computed_tokens=num_computed_tokens, num_kv_bytes=0, num_kv_bytes_arrived=0
    )


def asked(sent: list[tuple[WorkerId, Message]]) -> list[tuple[str, WorkerId, int]]:
    return [(m.request_id, worker, m.attempt) for worker, m in sent if isinstance(m, GrantRequest)]


def cancels(sent: list[tuple[WorkerId, Message]]) -> list[tuple[str, WorkerId, bool]]:
    return [(m.request_id, worker, m.sender_is_active) for worker, m in sent if isinstance(m, Cancel)]


def failure(event: GenerationEvent | None) -> str:
    assert isinstance(event, GenerationFailed)
    return event.code


def reached(router: Router, phase: str) -> None:
    match phase:
        case "granting":
            router.submit("a")
        case "prefilling":
            router.submit("a")
            router.grant("a")
        case _:
            router.running("a")
