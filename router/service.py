"""The router's engine room: router.core between the control socket and the HTTP side.

One asyncio loop owns everything here. A client's request is an event queue; whatever the core decides is carried out by
`_execute` at once, in order.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..cluster.config import ClusterSpec
from ..cluster.cost_profile import load_profile
from ..cluster.membership import Member
from ..cluster.protocol.identity import WorkerId, new_incarnation, new_request_id
from ..cluster.protocol.keys import KeyRing
from ..cluster.protocol.messages import Message
from ..kvtransfer.layout import KVLayout
from .core import CoreCommand, RouterCore
from .generation import Caller, Deliver, Finished, GenerationFailed, GenerationRequest
from .lifecycle import Emit, Send
from .link import RouterLink
from .loop_lag import LoopLag
from .probes import PassesQuestion, ProbeEnded, ProbeResult, TransferQuestion

log = logging.getLogger(__name__)

TICK_S = 0.1
DISPATCH_S = 0.02


class RouterService:
    """Implements router.generation.Backend, and router.probe_routes.ProbeBackend."""

    def __init__(self, spec: ClusterSpec, control: str, keys: KeyRing | None = None) -> None:
        costs = load_profile(Path(spec.router.costs)) if spec.router.costs is not None else None
        self._core = RouterCore(spec, new_incarnation(), costs)
        self._engines = {"PROMPT": spec.prompt.engine.kind, "COMPLETION": spec.completion.engine.kind}
        self._link = RouterLink(control, keys)
        self._readers: dict[str, Deliver] = {}
        self._answers: dict[str, asyncio.Future[ProbeResult]] = {}
        self._limits = {
            "queued_requests": spec.router.max_queued_requests,
            "queued_tokens": spec.router.max_queued_tokens,
            "queue_wait_s": spec.router.max_queue_wait_s,
            "attempts": spec.router.max_attempts,
        }
        self._loop_lag = LoopLag()
        self._started_s = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._stop: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None

    @property
    def is_ready(self) -> bool:
        return self._core.dispatcher.is_complete

    @property
    def max_model_len(self) -> int | None:
        return self._core.dispatcher.max_model_len

    def start(self) -> None:
        """Begin to listen to workers; needs a running event loop."""
        self._tasks = [asyncio.create_task(loop) for loop in (self._tick_loop(), self._dispatch_loop())]
        for task in self._tasks:
            task.add_done_callback(self._check)
        self._link.listen(self._receive)

    def on_failure(self, stop: Callable[[], None]) -> None:
        """Call `stop` when something here has failed: a bug, which must end the process and not leave it deaf."""
        self._stop = stop

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._link.close()

    def end_all(self, failure: GenerationFailed) -> None:
        """End what still runs by `failure`, as the terminal event of each request."""
        for request_id in list(self._readers):
            self._emit(Emit(request_id, failure))
            self._execute(self._core.cancel(request_id, time.monotonic()))

    def refusal(self, caller: Caller, priority: int) -> GenerationFailed | None:
        return self._core.refusal(caller, priority, time.monotonic())

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        self._readers[request.request_id] = deliver
        self._execute(self._core.submit(request, time.monotonic()))

    def cancel(self, request_id: str) -> None:
        if self._readers.pop(request_id, None) is not None:
            self._execute(self._core.cancel(request_id, time.monotonic()))

    def finish(self, request_id: str) -> None:
        self._execute(self._core.finish(request_id, time.monotonic()))

    async def probe(self, question: PassesQuestion | TransferQuestion) -> ProbeResult:
        """Ask live workers; being cancelled cancels the probe."""
        probe_id = new_request_id()
        answer = self._answers[probe_id] = asyncio.get_running_loop().create_future()
        try:
            self._execute(self._core.probe(probe_id, question, time.monotonic()))
            return await answer
        finally:
            del self._answers[probe_id]
            self._execute(self._core.cancel_probe(probe_id))

    def status(self) -> dict[str, Any]:
        now, core = time.monotonic(), self._core
        members = sorted(core.membership.members, key=lambda m: (m.hello.role, m.worker))
        return {
            "ready": self.is_ready,
            "incarnation": core.incarnation,
            "uptime_s": now - self._started_s,
            "max_model_len": self.max_model_len,
            "queued": core.dispatcher.num_queued,
            "queued_tokens": core.dispatcher.num_queued_tokens,
            "running": core.dispatcher.num_running,
            "limits": self._limits,
            "counts": dataclasses.asdict(core.dispatcher.counts),
            "malformed_messages": self._link.num_malformed,
            "loop_lag_s": self._loop_lag.worst_s(now),
            "workers": [_worker_status(m, now) | {"engine": self._engines[m.hello.role]} for m in members],
            "incidents": [{"at_s_ago": now - i.at_s, "worker": i.worker, "what": i.what} for i in core.incidents],
        }

    def _receive(self, worker: WorkerId, message: Message) -> None:
        try:
            self._execute(self._core.on_message(worker, message, time.monotonic()))
        except Exception as error:
            self._fail(error)

    def _check(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        log.error("the router's loop died", exc_info=error)
        self._stop()

    async def _dispatch_loop(self) -> None:
        """Give a worker more just before it ends what it has."""
        while True:
            await asyncio.sleep(DISPATCH_S)
            self._execute(self._core.dispatch(time.monotonic()))

    async def _tick_loop(self) -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._loop_lag.note(now - due_s, now)
            if self._link.has_lost_connection():
                self._core.connection_lost(now)
            self._link.check()
            self._execute(self._core.tick(now))

    def _execute(self, commands: Sequence[CoreCommand]) -> None:
        for command in commands:
            match command:
                case Send():
                    self._link.send(command.worker, command.message)
                case Emit():
                    self._emit(command)
                case ProbeEnded():
                    answer = self._answers.get(command.probe_id)
                    if answer is not None and not answer.done():
                        answer.set_result(command.result)

    def _emit(self, command: Emit) -> None:
        if isinstance(command.event, GenerationFailed):
            log.warning("request %s failed: %s", command.request_id, command.event.message)
        is_last = isinstance(command.event, Finished | GenerationFailed)
        deliver = (self._readers.pop if is_last else self._readers.get)(command.request_id, None)
        if deliver is not None:
            deliver(command.event)


def _worker_status(member: Member, now: float) -> dict[str, Any]:
    identity = member.hello.identity
    return {
        "name": member.worker.name,
        "incarnation": member.worker.incarnation,
        "role": member.hello.role,
        "state": member.state,
        "pid": member.hello.pid,
        "host": member.hello.host,
        "since_s": now - member.joined_s,
        "last_heartbeat_s": now - member.last_seen_s,
        "last_progress_s": now - member.last_progress_s,
        "model": identity.model,
        "fingerprint": identity.fingerprint,
        "dtype": identity.dtype,
        "kv_bytes_per_token": KVLayout(**identity.layout.model_dump()).token_bytes,
        "block_size": member.hello.block_size,
        "num_blocks": member.hello.num_blocks,
        "max_model_len": member.hello.max_model_len,
        "max_num_batched_tokens": member.hello.max_num_batched_tokens,
        "max_num_seqs": member.hello.max_num_seqs,
        "load": member.load.model_dump() if member.load else None,
    }
