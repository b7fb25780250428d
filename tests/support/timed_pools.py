"""A dispatcher between clients and one pair of workers that take their time, on a clock of its own.

The PROMPT worker computes one prompt after the other, the COMPLETION worker grants at once and frees the blocks at the
end. A request has one output token, so it ends with its prefill.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
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
    Prefill,
    PrefillStages,
    SampledToken,
    SamplingParams,
)
from twinpool.router.admission import AdmissionLimits
from twinpool.router.dispatch import Dispatcher, DispatchLimits
from twinpool.router.generation import ANYBODY, Caller, GenerationEvent, GenerationFailed, GenerationRequest, TokensSent
from twinpool.router.lifecycle import Emit, RouterCommand, Send

P, D = WorkerId("prompt-0", "x"), WorkerId("completion-0", "x")
LAYOUT = KVLayoutInfo(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
IDENTITY = ModelIdentity(model="m", fingerprint="f", dtype="float32", layout=LAYOUT)
GRANT_S, DISPATCH_S, TICK_S = 0.005, 0.02, 0.1


@dataclass
class Asked:
    """One request as its client sees it."""

    submitted_s: float
    begun_s: float | None = None  # its prompt went to the PROMPT worker
    ended_s: float | None = None
    end: GenerationEvent | None = None

    @property
    def code(self) -> str | None:
        return self.end.code if isinstance(self.end, GenerationFailed) else None

    @property
    def took_s(self) -> float:
        assert self.ended_s is not None
        return self.ended_s - self.submitted_s


@dataclass
class TimedPools:
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    seconds_per_token: float = 0.001
    has_workers: bool = True

    def __post_init__(self) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(DispatchLimits(self.admission, 60.0, 3, 10.0, 1.0, 5.0))
        self.asked: dict[str, Asked] = {}
        self.gone: set[str] = set()
        self.sent: list[Message] = []
        self._prompt_free_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        for worker in (P, D) if self.has_workers else ():
            self._do(self.dispatcher.worker_joined(worker, _hello(worker), 0.0))
        self._every(DISPATCH_S, lambda: self._do(self.dispatcher.dispatch(self.now)))
        self._every(TICK_S, lambda: self._do(self.dispatcher.tick(self.now)))

    def submit(self, name: str, caller: Caller = ANYBODY, length: int = 100, **how: Any) -> Asked:
        request = GenerationRequest(name, tuple(range(length)), SamplingParams(max_tokens=1), caller, **how)
        self.asked[name] = Asked(self.now)
        self._do(self.dispatcher.submit(request, self.now))
        return self.asked[name]

    def cancel(self, name: str) -> None:
        self.gone.add(name)
        self._do(self.dispatcher.cancel(name, self.now))

    def at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until_s

    def _every(self, period_s: float, work: Callable[[], None]) -> None:
        def again() -> None:
            work()
            self.at(self.now + period_s, again)

        self.at(period_s, again)

    def _do(self, commands: Sequence[RouterCommand]) -> None:
        for command in commands:
            match command:
                case Send():
                    self.sent.append(command.message)
                    self._worker_gets(command.message)
                case Emit() if not isinstance(command.event, TokensSent):
                    asked = self.asked[command.request_id]
                    assert asked.end is None, "I3: a request ends once"
                    asked.end, asked.ended_s = command.event, self.now
                case _:
                    pass
        self.dispatcher.check()

    def _worker_gets(self, message: Message) -> None:
        match message:
            case GrantRequest():
                self._check_wanted(message)
                self.at(self.now + GRANT_S, lambda: self._says(D, _granted(message)))
            case Prefill():
                self._check_wanted(message)
                self.asked[message.request_id].begun_s = self.now
                duration_s = len(message.token_ids) * self.seconds_per_token
                self._prompt_free_s = max(self._prompt_free_s, self.now) + duration_s
                self.at(self._prompt_free_s, lambda: self._says(P, _first_token(message, duration_s)))
            case Cancel():
                pass
            case _:
                pass

    def _says(self, worker: WorkerId, message: Message) -> None:
        self._do(self.dispatcher.on_message(worker, message, self.now))

    def _check_wanted(self, message: GrantRequest | Prefill) -> None:
        name = message.request_id
        assert self.asked[name].end is None, "begun after its end"
        assert name not in self.gone, "begun after its client had left"
        assert message.remaining_ms is not None, "a request without a deadline"
        assert message.remaining_ms > 0, "begun after its deadline"


def _hello(worker: WorkerId) -> Hello:
    return Hello(
        role="PROMPT" if worker == P else "COMPLETION",
        pid=1,
        host="h",
        identity=IDENTITY,
        block_size=16,
        num_blocks=100_000,
        max_model_len=100_000,
        max_num_batched_tokens=2048,
        max_num_seqs=1024,
        data_addresses=("tcp://d",) if worker == D else (),
    )


def _granted(message: GrantRequest) -> Granted:
    return Granted(
        request_id=message.request_id, attempt=message.attempt, generation=1, credit_bytes=1, num_free_blocks=90_000
    )


def _first_token(message: Prefill, prefill_s: float) -> FirstToken:
    num_tokens = len(message.token_ids)
    return FirstToken(
        request_id=message.request_id,
        attempt=message.attempt,
        position=0,
        token=SampledToken(token=1),
        finish_reason="length",
        stages=PrefillStages(
            queue_s=0, prefill_s=prefill_s, num_computed_tokens=num_tokens, num_kv_bytes=0, num_kv_bytes_arrived=0
        ),
    )
