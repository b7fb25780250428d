"""A simulated router process around the real core: its life and death, its ticks, and what it sends to the workers."""

from collections.abc import Callable, Sequence

from simulated_network import Simulation
from simulated_process import SimulatedWorker
from twinpool.cluster.config import ClusterSpec
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import PROBE_ATTEMPT, Granted, GrantRequest, Message, Prefill
from twinpool.router.core import CoreCommand, RouterCore
from twinpool.router.lifecycle import Emit, Send
from twinpool.router.probes import ProbeEnded

OnCommand = Callable[[Send | Emit | ProbeEnded], None]


class SimulatedRouter:
    """`on_command` sees what the core decides; messages to workers go out by themselves."""

    def __init__(
        self,
        sim: Simulation,
        spec: ClusterSpec,
        number: int,
        workers: Callable[[], Sequence[SimulatedWorker]],
        on_command: OnCommand,
    ) -> None:
        self.sim, self.number = sim, number
        self.name = "router" if number == 0 else f"router-{number}"
        self.num_resumed = 0  # attempts that went on from KV that a dead PROMPT worker had sent
        self.is_alive = False
        self.paused_until_s = 0.0
        self.was_touched = False  # by this event
        self._spec, self._workers, self._on_command = spec, workers, on_command
        self._num_lives = 0
        self.start()

    def start(self) -> None:
        self._num_lives += 1
        self.is_alive, self.paused_until_s = True, 0.0
        self.core = RouterCore(self._spec, f"{self.name}-life-{self._num_lives}")
        self._tick(self._num_lives)

    @property
    def is_paused(self) -> bool:
        return self.sim.now < self.paused_until_s + 0.2  # its next tick included

    def crash(self) -> None:
        """Die and come back a while later."""
        self.is_alive = False
        self.sim.at(self.sim.now + 2 * self.sim.rng.random(), self.start)

    def gets(self, worker: WorkerId, message: Message) -> None:
        self.when_awake(lambda: self._hear(worker, message))

    def when_awake(self, action: Callable[[], None]) -> None:
        """Do it when this process runs again; a dead one never does."""
        life = self._num_lives
        if self.is_alive and self.sim.now < self.paused_until_s:
            resume = lambda: self.when_awake(action) if life == self._num_lives else None  # noqa: E731
            self.sim.at(self.paused_until_s, resume)
        elif self.is_alive:
            action()

    def _hear(self, worker: WorkerId, message: Message) -> None:
        self.num_resumed += isinstance(message, Granted) and any(message.arrived_tokens)
        self.execute(self.core.on_message(worker, message, self.sim.now))

    def execute(self, commands: Sequence[CoreCommand]) -> None:
        self.was_touched = True
        for command in commands:
            self._on_command(command)
            if isinstance(command, Send):
                self._check_spared(command)
                worker = next(w for w in self._workers() if w.name == command.worker.name)
                deliver = lambda w=worker, c=command: w.router_says(self.number, c.worker, c.message)  # noqa: E731
                self.sim.send(self.name, worker.name, deliver)

    def _tick(self, life: int) -> None:
        if self.is_alive and life == self._num_lives:
            self.execute(self.core.tick(self.sim.now))
            next_s = max(self.sim.now + 0.1, self.paused_until_s)
            self.sim.at(next_s, lambda: self.when_awake(lambda: self._tick(life)))

    def _check_spared(self, command: Send) -> None:
        message = command.message
        is_request = isinstance(message, GrantRequest | Prefill) and message.attempt != PROBE_ATTEMPT
        assert not (is_request and command.worker in self.core.probes.workers), "a request for a worker under probe"
