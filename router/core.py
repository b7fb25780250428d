"""What the router decides about workers and requests together. Pure: messages in, commands out, the clock an argument.

Joins membership (who is there) with dispatch (what runs where), and keeps the incidents that `twinpool status` shows.
"""

from collections import deque
from dataclasses import dataclass

from ..cluster.config import ClusterSpec
from ..cluster.cost_profile import CostProfile, check_fingerprint
from ..cluster.costs import CostModel
from ..cluster.membership import Gone, Joined, Membership
from ..cluster.protocol.errors import ConfigError
from ..cluster.protocol.identity import WorkerId
from ..cluster.protocol.messages import Heartbeat, Hello, Introduce, Leaving, Message, Refused, Welcome
from .admission import AdmissionLimits
from .dispatch import Dispatcher, DispatchLimits
from .generation import Caller, GenerationFailed, GenerationRequest
from .lifecycle import RouterCommand, Send
from .probes import PassesQuestion, ProbeCommand, ProbeEnded, Probes, TransferQuestion

CoreCommand = RouterCommand | ProbeEnded
MAX_INCIDENTS = 100


@dataclass(frozen=True)
class Incident:
    """Something an operator wants to know: who came, who went, and why."""

    at_s: float
    worker: str
    what: str


class RouterCore:
    def __init__(self, spec: ClusterSpec, incarnation: str, costs: CostProfile | None = None) -> None:
        router, liveness = spec.router, spec.liveness
        self.incarnation = incarnation
        self._costs = costs
        self.membership = Membership(liveness)
        self.dispatcher = Dispatcher(
            DispatchLimits(
                admission=AdmissionLimits(
                    router.max_queued_requests, router.max_queued_tokens, router.max_queue_wait_s
                ),
                request_timeout_s=router.request_timeout_s,
                max_attempts=router.max_attempts,
                no_worker_grace_s=router.no_worker_grace_s,
                renew_s=liveness.renew_s,
                answer_s=liveness.lease_s,
            )
        )
        self.probes = Probes(self.membership, self.dispatcher.is_idle, liveness.lease_s)
        self.incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)

    def refusal(self, caller: Caller, priority: int, now: float) -> GenerationFailed | None:
        """Return why `caller` would be refused now, whatever it asks for."""
        return self.dispatcher.refusal(caller, priority, now)

    def submit(self, request: GenerationRequest, now: float) -> list[RouterCommand]:
        return self.dispatcher.submit(request, now)

    def cancel(self, request_id: str, now: float) -> list[RouterCommand]:
        return self.dispatcher.cancel(request_id, now)

    def finish(self, request_id: str, now: float) -> list[RouterCommand]:
        return self.dispatcher.finish(request_id, now)

    def probe(self, probe_id: str, question: PassesQuestion | TransferQuestion, now: float) -> list[ProbeCommand]:
        """Ask workers for times; exactly one ProbeEnded follows, unless the probe is cancelled."""
        commands = self.probes.begin(probe_id, question, now)
        self._spare_workers()
        return commands

    def cancel_probe(self, probe_id: str) -> list[ProbeCommand]:
        commands = self.probes.cancel(probe_id)
        self._spare_workers()
        return commands

    def on_message(self, worker: WorkerId, message: Message, now: float) -> list[CoreCommand]:
        match message:
            case Hello():
                return self._hello(worker, message, now)
            case _ if self.membership.get(worker) is None:
                return [Send(worker, Introduce())]
            case Leaving():
                return self._gone(self.membership.leave(worker, "stopped"), now)
            case Heartbeat():
                self.membership.heartbeat(worker, message, now)
                if worker not in self.probes.workers:  # what a probe holds is free again at its end
                    self.dispatcher.load_reported(worker, message.load)
                return []
            case _:
                commands = self.probes.on_message(worker, message)
                self._spare_workers()
                return [*commands, *self.dispatcher.on_message(worker, message, now)]

    def connection_lost(self, now: float) -> None:
        """Some worker's connection has closed."""
        self.membership.connection_lost(now)

    def tick(self, now: float) -> list[CoreCommand]:
        """Notice the dead, expire what is overdue, renew what is wanted. Call it several times a second."""
        gone = [command for change in self.membership.tick(now) for command in self._gone(change, now)]
        late = self.probes.tick(now)
        self._spare_workers()
        return [*gone, *late, *self.dispatcher.tick(now)]

    def dispatch(self, now: float) -> list[RouterCommand]:
        """Call it many times a second, between ticks."""
        return self.dispatcher.dispatch(now)

    def _spare_workers(self) -> None:
        """Suspect workers and those under probe get nothing new."""
        suspects = frozenset(member.worker for member in self.membership.members if member.state == "suspect")
        self.dispatcher.suspects = suspects | self.probes.workers

    def _hello(self, worker: WorkerId, hello: Hello, now: float) -> list[CoreCommand]:
        reason = self.membership.mismatch(hello)
        if reason is not None:
            self.incidents.append(Incident(now, worker.name, f"refused: {reason}"))
            return [Send(worker, Refused(reason=reason[:1024]))]
        commands: list[CoreCommand] = [Send(worker, Welcome(router_incarnation=self.incarnation))]
        for change in self.membership.join(worker, hello, now):
            match change:
                case Joined():
                    self.incidents.append(Incident(now, worker.name, f"joined as {hello.role}, pid {hello.pid}"))
                    cost = self._cost_of(worker, hello, now)
                    commands += self.dispatcher.worker_joined(worker, hello, now, cost)
                case Gone():
                    commands += self._gone(change, now)
        return commands

    def _cost_of(self, worker: WorkerId, hello: Hello, now: float) -> CostModel | None:
        """Return what was measured on workers like this one; of another model or dtype it would say nothing."""
        if self._costs is None:
            return None
        identity = hello.identity
        try:
            check_fingerprint(self._costs, {"weights": identity.fingerprint, "dtype": identity.dtype})
        except ConfigError as error:
            self.incidents.append(Incident(now, worker.name, f"its costs are not known: {error.message}"))
            return None
        return self._costs.model()

    def _gone(self, gone: Gone, now: float) -> list[CoreCommand]:
        self.incidents.append(Incident(now, gone.worker.name, f"gone: {gone.reason}"))
        return [*self.probes.worker_gone(gone.worker), *self.dispatcher.worker_gone(gone.worker, now)]
