"""A whole cluster in one thread and on one simulated clock: the real cores, a simulated network, seeded faults.

Several routers may serve one set of workers; each has its own clients.

Everything random comes from one seed, so a failing seed replays exactly. After every event the invariants are checked:
I1 (block ownership) and I2 (generations) on the worker it touched, I3 (one terminal event) for every request, I6
(nothing waits without a deadline). `Cluster.run` checks at the end that every request ended and every block came home.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from simulated_network import Faults, Simulation
from simulated_process import SimulatedWorker
from simulated_router import SimulatedRouter
from simulated_workers import LEASE_S, SimulatedCompletionWorker, SimulatedPromptWorker
from twinpool.cluster.config import ClusterSpec, LivenessSpec, RouterSpec
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    PROBE_ATTEMPT,
    GrantRequest,
    Message,
    Prefill,
    SampledToken,
    SamplingParams,
)
from twinpool.engine.fake import expected_scores, expected_tokens
from twinpool.router.core import CoreCommand
from twinpool.router.generation import Caller, Finished, GenerationEvent, GenerationRequest, PromptScored, TokensSent
from twinpool.router.lifecycle import Emit, Send
from twinpool.router.probes import PassesQuestion, ProbeEnded, ProbeResult, TransferQuestion

SPEC = ClusterSpec(
    router=RouterSpec(request_timeout_s=60.0, max_attempts=6, no_worker_grace_s=10.0),
    liveness=LivenessSpec(lease_s=LEASE_S, stalled_after_s=8.0),
)


@dataclass
class Client:
    """One request as its client sees it."""

    request: GenerationRequest
    router: SimulatedRouter
    tokens: list[int] = field(default_factory=list)
    scores: list[SampledToken] = field(default_factory=list)
    terminal: GenerationEvent | None = None
    is_gone: bool = False  # it hung up, or the router died under it
    submitted_s: float = 0.0
    needs_tokens: int | None = None  # it reads no further

    @property
    def has_enough(self) -> bool:
        return self.needs_tokens is not None and len(self.tokens) >= self.needs_tokens


@dataclass
class AskedProbe:
    """One probe as whoever asked for it sees it."""

    question: PassesQuestion | TransferQuestion
    router: SimulatedRouter
    asked_s: float
    result: ProbeResult | None = None
    is_gone: bool = False  # nobody waits any more, or the router died under it


class Cluster:
    """Some routers, two PROMPT and two COMPLETION workers, some clients."""

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        num_requests: int = 16,
        num_probes: int = 0,
        num_routers: int = 1,
    ) -> None:
        rng = random.Random(seed ^ 0x5EED)
        self.sim = Simulation(seed, faults or Faults.random(rng))
        self.num_prompt_blocks = rng.choice([24, 64])
        self.num_completion_blocks = rng.choice([18, 20, 64])
        self._terms = random.Random(seed ^ 0x7E2A)
        self.has_fixed_addresses = random.Random(seed ^ 0xADD2).random() < 0.3
        self._which = random.Random(seed ^ 0x2007)  # of the routers
        self.clients: dict[str, Client] = {}
        self.probes: dict[str, AskedProbe] = {}
        self.touched: set[SimulatedWorker] = set()  # whose state this event may have changed
        self.prompts: list[SimulatedPromptWorker] = []
        self.completions: list[SimulatedCompletionWorker] = []
        self.routers: list[SimulatedRouter] = []
        for number in range(num_routers):
            self.routers.append(SimulatedRouter(self.sim, SPEC, number, lambda: self.workers, self._on_command))
        self.prompts = [SimulatedPromptWorker(self, f"prompt-{i}") for i in range(2)]
        self.completions = [SimulatedCompletionWorker(self, f"completion-{i}") for i in range(2)]
        self._plan_requests(num_requests)
        self._plan_faults()
        self._plan_probes(num_probes)

    @property
    def workers(self) -> list[SimulatedWorker]:
        return [*self.prompts, *self.completions]

    def completion_at(self, peer: tuple[str, ...]) -> SimulatedCompletionWorker:
        return next(w for w in self.completions if w.name == peer[0].split("/")[3])

    def run(self) -> None:
        """Run until every fault is over and everything has had time to settle; check as we go and at the end."""
        end_s = self.sim.healed_s + 2 * LEASE_S  # until then something late may still come
        while not self._is_settled and end_s <= self.sim.healed_s + 70.0:
            self.sim.run(end_s, self._check)
            end_s += LEASE_S
        self._check_settled()

    @property
    def router_names(self) -> list[str]:
        return [router.name for router in self.routers]

    @property
    def num_resumed(self) -> int:
        return sum(router.num_resumed for router in self.routers)

    def router_gets(self, router: int, worker: WorkerId, message: Message) -> None:
        self.routers[router].gets(worker, message)

    def crash(self, router: SimulatedRouter) -> None:
        """Kill it, if it lives; its clients go with it, and it comes back a while later."""
        if not router.is_alive:
            return
        router.crash()
        for client in self.clients.values():
            client.is_gone |= client.router is router and client.terminal is None
        for probe in self.probes.values():
            probe.is_gone |= probe.router is router and probe.result is None

    def _on_command(self, command: CoreCommand) -> None:
        match command:
            case Send():
                self._check_wanted(command.message)
            case Emit():
                self._client_gets(self.clients[command.request_id], command.event)
            case ProbeEnded():
                probe = self.probes[command.probe_id]
                assert probe.result is None, "a probe ends once"
                probe.result = command.result

    def _check_wanted(self, message: Message) -> None:
        """Nothing is begun, or goes on elsewhere, that has ended or whose time has passed."""
        if not isinstance(message, GrantRequest | Prefill) or message.attempt == PROBE_ATTEMPT:
            return
        client = self.clients[message.request_id]
        assert client.terminal is None, "begun after its end"
        assert not client.is_gone, "begun after its client had left"
        left_s = min(client.request.timeout_s or 60.0, 60.0) - (self.sim.now - client.submitted_s)
        assert message.remaining_ms is not None, "a request without a deadline"
        assert left_s > 0.0, "begun too late"
        assert -1e-6 <= message.remaining_ms / 1000 - left_s <= 0.0011, "a wrong deadline"  # rounded up to milliseconds

    def _client_gets(self, client: Client, event: GenerationEvent) -> None:
        assert client.terminal is None, "I3: an event after the terminal one"
        if isinstance(event, PromptScored):
            assert event.position == len(client.scores) + 1, "scores out of order, or one of them twice"
            assert not client.tokens, "scores behind a token"
            client.scores += event.tokens
        elif isinstance(event, TokensSent):
            assert event.position == len(client.tokens), "tokens out of order, or one of them twice"
            client.tokens += [token.token for token in event.tokens]
            if client.has_enough:
                self.sim.at(self.sim.now, lambda: self._stop_reading(client))
        else:
            client.terminal = event

    def _plan_requests(self, num_requests: int) -> None:
        rng = self.sim.rng
        for number in range(num_requests):
            length, max_tokens = rng.choice([1, 3, 8, 20, 45]), rng.choice([1, 2, 5, 12, 40])
            wishes: dict[str, Any] = {"scores_prompt": True, "num_logprobs": 2} if number % 3 == 0 else {}
            sampling = SamplingParams(max_tokens=max_tokens, seed=number, **wishes)
            prompt = tuple(rng.randrange(256) for _ in range(length))
            request = self._on_terms(GenerationRequest(f"request-{number}", prompt, sampling))
            at_s = 1.0 + rng.random() * rng.choice([0.1, 5.0, 15.0])
            self.sim.at(at_s, lambda r=request: self._submit(r))
            if rng.random() < 0.15:
                self.sim.at(at_s + rng.random(), lambda r=request: self._hang_up(r.request_id))

    def _on_terms(self, request: GenerationRequest) -> GenerationRequest:
        """Give it a caller, a priority, and perhaps little time."""
        rng = self._terms
        caller, priority = Caller(rng.choice(["", "a", "b"]), rng.choice([1.0, 3.0])), rng.choice([0, 0, 1])
        timeout_s = rng.choice([None, None, 0.05, 0.5, 3.0]) if self.sim.faults.have_deadlines else None
        return replace(request, caller=caller, priority=priority, timeout_s=timeout_s)

    def _submit(self, request: GenerationRequest) -> None:
        router = self._which.choice(self.routers)
        router.when_awake(lambda: self._begin(router, request))

    def _begin(self, router: SimulatedRouter, request: GenerationRequest) -> None:
        needs_tokens = 3 if request.sampling.seed % 5 == 4 else None
        self.clients[request.request_id] = Client(request, router, submitted_s=self.sim.now, needs_tokens=needs_tokens)
        router.execute(router.core.submit(request, self.sim.now))

    def _hang_up(self, request_id: str) -> None:
        client = self.clients.get(request_id)
        if client is not None:
            client.router.when_awake(lambda: self._leave(client))  # before that nobody knows

    def _leave(self, client: Client) -> None:
        if client.terminal is None and not client.is_gone:
            client.is_gone = True
            client.router.execute(client.router.core.cancel(client.request.request_id, self.sim.now))

    def _stop_reading(self, client: Client) -> None:
        """Its text holds a stop string: the router ends it for the reader, unless something else did meanwhile."""
        router = client.router
        if router.is_alive and client.terminal is None and not client.is_gone:
            router.execute(router.core.finish(client.request.request_id, self.sim.now))
            assert isinstance(client.terminal, Finished), "an answer that was enough did not end well"

    def _plan_probes(self, num_probes: int) -> None:
        """Ask for passes and transfers at random times; some do not wait for the result."""
        rng = self.sim.rng
        for number in range(num_probes):
            at_s, limit_s = 0.5 + rng.random() * 25, rng.choice([0.05, 1.0, 5.0])
            question: PassesQuestion | TransferQuestion
            if rng.random() < 0.5:
                name = rng.choice([worker.name for worker in self.workers])
                rows = rng.choice([((0, 7),), ((9, 1),) * 4, ((4, 3), (8, 1), (0, 1))])
                question = PassesQuestion(worker=name, rows=rows, num_repeats=rng.choice([1, 30]), limit_s=limit_s)
            else:
                prompt, completion = rng.choice(self.prompts).name, rng.choice(self.completions).name
                num_tokens = rng.choice([1, 30, 75])
                question = TransferQuestion(
                    prompt=prompt, completion=completion, num_tokens=num_tokens, limit_s=limit_s
                )
            self.sim.at(at_s, lambda n=number, q=question: self._ask_probe(f"probe-{n}", q))
            if rng.random() < 0.2:
                self.sim.at(at_s + rng.random() * 0.1, lambda n=number: self._drop_probe(f"probe-{n}"))

    def _ask_probe(self, probe_id: str, question: PassesQuestion | TransferQuestion) -> None:
        router = self._which.choice(self.routers)
        router.when_awake(lambda: self._begin_probe(router, probe_id, question))

    def _begin_probe(self, router: SimulatedRouter, probe_id: str, question: PassesQuestion | TransferQuestion) -> None:
        self.probes[probe_id] = AskedProbe(question, router, self.sim.now)
        router.execute(router.core.probe(probe_id, question, self.sim.now))

    def _drop_probe(self, probe_id: str) -> None:
        probe = self.probes.get(probe_id)
        if probe is not None and probe.result is None and not probe.is_gone:
            probe.is_gone = True
            probe.router.when_awake(lambda: probe.router.execute(probe.router.core.cancel_probe(probe_id)))

    def _plan_faults(self) -> None:
        rng, faults, sim = self.sim.rng, self.sim.faults, self.sim
        for _ in range(faults.num_crashes):
            victim, says_goodbye = rng.choice(self.workers), rng.random() < 0.3
            at_s = 1.0 + rng.random() * 16
            sim.at(at_s, lambda w=victim, g=says_goodbye: w.crash(g) if w.is_alive else None)
        for _ in range(faults.num_pauses):
            worker, pause_s = rng.choice(self.workers), rng.choice([0.5, 2.5, 6.0])
            sim.at(1.0 + rng.random() * 12, lambda w=worker, p=pause_s: setattr(w, "paused_until_s", sim.now + p))
        for _ in range(faults.num_hangs):
            worker, hang_s = rng.choice(self.workers), rng.choice([1.0, 6.0, 10.0])
            sim.at(1.0 + rng.random() * 8, lambda w=worker, h=hang_s: w.hang(h))
        names = [*self.router_names, *(worker.name for worker in self.workers)]
        for _ in range(faults.num_partitions):
            a, b = rng.sample(names, 2)
            duration_s, at_s = rng.choice([0.2, 2.0, 6.0]), 1.0 + rng.random() * 12
            for ends in [(a, b), (b, a)] if rng.random() < 0.5 else [(a, b)]:
                sim.at(at_s, lambda e=ends, d=duration_s: sim.cut(*e, d))
        for _ in range(faults.num_slow_links):
            a, b = rng.sample(names, 2)
            duration_s, by_s = rng.choice([0.5, 3.0, 6.0]), rng.choice([0.05, 0.5, 2.5])
            sim.at(1.0 + rng.random() * 10, lambda a=a, b=b, d=duration_s, s=by_s: sim.slow_down(a, b, d, s))
        for _ in range(faults.num_router_crashes):
            victim = self._which.choice(self.routers)
            sim.at(2.0 + rng.random() * 10, lambda r=victim: self.crash(r))
        for _ in range(faults.num_router_pauses):
            router, pause_s = self._which.choice(self.routers), rng.choice([0.5, 2.5, 6.0])
            sim.at(1.0 + rng.random() * 12, lambda r=router, p=pause_s: setattr(r, "paused_until_s", sim.now + p))

    def _check(self) -> None:
        """Check what the event just handled may have changed."""
        for router in self.routers:
            if router.was_touched and router.is_alive:
                router.core.dispatcher.check()
                self._check_deadlines()
            router.was_touched = False
        while self.touched:
            self.touched.pop().check()

    def _check_deadlines(self) -> None:
        for client in self.clients.values():
            limit_s = min(client.request.timeout_s or 60.0, SPEC.router.request_timeout_s) + 1.0
            is_open = client.terminal is None and not client.is_gone and not client.router.is_paused
            assert not is_open or self.sim.now - client.submitted_s <= limit_s, "I3: a request outlived its deadline"
        for probe in self.probes.values():
            limit_s = probe.question.limit_s + LEASE_S + 1.0
            is_open = probe.result is None and not probe.is_gone and not probe.router.is_paused
            assert not is_open or self.sim.now - probe.asked_s <= limit_s, "I6: a probe outlived its deadline"

    @property
    def _is_settled(self) -> bool:
        """Every request has ended and every block is home: from here on there is nothing to see."""
        have_ended = all(client.terminal is not None or client.is_gone for client in self.clients.values())
        are_idle = all(w.is_alive and w.core.pool.num_free == w.core.pool.num_blocks for w in self.workers)
        are_back = all(r.is_alive and len(r.core.membership.members) == len(self.workers) for r in self.routers)
        senders = [sender for prompt in self.prompts for sender in prompt.senders.values()]
        is_quiet = are_idle and are_back and not any(len(sender.core) for sender in senders)
        return self.sim.now > 0 and have_ended and is_quiet

    def _check_settled(self) -> None:
        for client in self.clients.values():
            request = client.request
            assert client.terminal is not None or client.is_gone, f"I3: {request.request_id} never ended"
            right = expected_tokens(request.token_ids, request.sampling.max_tokens, seed=request.sampling.seed)
            assert client.tokens == right[: len(client.tokens)], f"I4: {request.request_id} got wrong tokens"
            is_whole = client.tokens == right or client.has_enough
            assert not isinstance(client.terminal, Finished) or is_whole, "I4: an answer cut short"
            scores = expected_scores(request.token_ids, 2) if request.sampling.scores_prompt else []
            assert client.scores == scores[: len(client.scores)], f"I4: {request.request_id} got wrong scores"
            assert not client.tokens or client.scores == scores, "a token before the last score"
        for router in self.routers:
            assert router.is_alive, "every crashed router came back"
            assert not router.core.probes.workers, "a worker is spared for a probe that has ended"
            assert len(router.core.membership.members) == len(self.workers), "a worker did not come back to its router"
        for worker in self.workers:
            assert not worker.core.probe.is_active, "a probe that nobody waits for still runs"
            assert worker.is_alive, "every crashed worker came back"
            assert worker.core.pool.num_free == worker.core.pool.num_blocks, f"I1: {worker.name} keeps blocks"
        for prompt in self.prompts:
            assert not any(len(sender.core) for sender in prompt.senders.values()), "a transfer never closed"
