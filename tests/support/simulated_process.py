"""What both kinds of simulated worker share: life and death, the links to the routers, the turn of the loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from simulated_network import Simulation
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    Heartbeat,
    Hello,
    Introduce,
    Leaving,
    Message,
    SampledToken,
    Unknown,
    Welcome,
)
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.fake import FakeEngine
from twinpool.engine.ownership import Orphaned, Ownership
from twinpool.engine.probe import PassProbe
from twinpool.engine.sequence import ScheduledRow
from twinpool.prefill_worker.core import Peer

if TYPE_CHECKING:
    from simulated_workers import SimulatedCompletionWorker


class Surroundings(Protocol):
    """What a simulated worker sees of the cluster that it is in."""

    sim: Simulation
    touched: "set[SimulatedWorker]"
    num_prompt_blocks: int
    num_completion_blocks: int
    has_fixed_addresses: bool
    router_names: list[str]

    def router_gets(self, router: int, worker: WorkerId, message: Message) -> None: ...

    def completion_at(self, peer: Peer) -> "SimulatedCompletionWorker": ...


@dataclass
class SimulatedLink:
    """The control connection to one router."""

    router: int
    worker: WorkerId
    is_joined: bool = False
    router_incarnation: str | None = None


class SimulatedWorker:
    """What both kinds of process share: life and death, the control link, the turn of the loop."""

    def __init__(self, cluster: Surroundings, name: str) -> None:
        self.cluster, self.sim, self.name = cluster, cluster.sim, name
        self.num_lives = 0
        self.is_alive = False
        self.start()

    def start(self) -> None:
        self.num_lives += 1
        self.is_alive, self.is_stepping = True, False
        self.paused_until_s = self.hung_until_s = 0.0
        self.num_incarnations = 0
        self.held_blocks: set[int] = set()
        self.progress = 0
        self.ownership = Ownership()
        self.heard = 0  # the router whose message is being handled
        self.inbox: list[Callable[[], None]] = []
        self.next_turn_s: float | None = None
        self.links = [SimulatedLink(i, self._new_incarnation()) for i in range(len(self.cluster.router_names))]
        self.boot()
        for link in self.links:
            self._say_hello(link, self.num_lives)
            self._beat(link, self.num_lives)

    def boot(self) -> None:
        raise AssertionError("each kind has its own")

    def crash(self, says_goodbye: bool) -> None:
        """Die and come back a while later; a process that is stopped on purpose says so first."""
        for link in self.links:
            if says_goodbye and link.is_joined:
                self._send(link, Leaving())
        self.is_alive = False
        life = self.num_lives
        self.sim.at(
            self.sim.now + 0.5 + 3 * self.sim.rng.random(), lambda: self.start() if life == self.num_lives else None
        )

    def hang(self, duration_s: float) -> None:
        """The loop stops inside a step; other threads, and so the heartbeat, go on."""
        self.hung_until_s = self.sim.now + duration_s
        self.wake(self.sim.now)

    def _come_to(self) -> None:
        self.is_stepping = False
        self.wake(self.sim.now)

    def post(self, action: Callable[[], None]) -> None:
        """Put something into this process's inbox; a dead process gets nothing."""
        if self.is_alive:
            self.inbox.append(action)
            self.wake(self.sim.now)

    def wake(self, at_s: float) -> None:
        """Have a turn of the loop no later than `at_s`, unless a step is running: it ends with a turn anyway."""
        at_s = max(at_s, self.paused_until_s, self.sim.now)
        if self.is_stepping or (self.next_turn_s is not None and self.next_turn_s <= at_s):
            return
        self.next_turn_s = at_s
        life = self.num_lives
        self.sim.at(at_s, lambda: self._turn(life, at_s))

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do `action` later in this same life of the process, pauses included."""
        life = self.num_lives

        def fire() -> None:
            if not self.is_alive or life != self.num_lives:
                return
            if self.sim.now < self.paused_until_s:
                self.sim.at(self.paused_until_s, fire)
            else:
                self.cluster.touched.add(self)
                action()

        self.sim.at(self.sim.now + delay_s, fire)

    def to_router(self, message: Message) -> None:
        """Tell each router what concerns it, as engine.control does."""
        parts = [(self.heard, message)] if isinstance(message, Unknown) else self.ownership.addressed(message)
        for router, part in parts:
            self._send(self.links[router], part)

    def router_says(self, router: int, worker: WorkerId, message: Message) -> None:
        link = self.links[router]
        if worker == link.worker:
            self.post(lambda: self._on_control(link, worker, message))

    def _send(self, link: SimulatedLink, message: Message) -> None:
        worker, router = link.worker, link.router
        name = self.cluster.router_names[router]
        source = self.name + "/heartbeat" if isinstance(message, Heartbeat) else self.name
        self.sim.send(source, name, lambda: self.cluster.router_gets(router, worker, message))

    def poison_freed(self, pool: BlockPool, engine: FakeEngine) -> None:
        """Overwrite blocks that nobody holds any more: whoever still reads them gets other bytes, and other tokens."""
        holdings = [pool.holding(owner) for owner in pool.owners()]
        held = {block for holding in holdings if holding is not None for block in holding.blocks}
        freed, self.held_blocks = sorted(self.held_blocks - held), held
        num_tokens = len(freed) * engine.block_size
        poison = bytes([0xDB]) * engine.layout.frame_bytes(engine.layout.num_layers, num_tokens)
        if freed:
            engine.scatter(freed, range(engine.layout.num_layers), range(num_tokens), memoryview(poison))

    def turn(self) -> None:
        raise AssertionError("each kind has its own")

    def on_router(self, message: Message) -> None:
        raise AssertionError("each kind has its own")

    def reset(self, orphaned: Orphaned) -> None:
        raise AssertionError("each kind has its own")

    def request_ids(self) -> set[str]:
        raise AssertionError("each kind has its own")

    def greeting(self) -> Hello:
        raise AssertionError("each kind has its own")

    def heartbeat(self) -> Heartbeat:
        raise AssertionError("each kind has its own")

    def run_pass(self, probe: PassProbe, engine: FakeEngine) -> None:
        """Run a pass of a probe, as engine.timing does."""
        if probe.unwritten():
            probe.written(self.sim.now)
        rows = probe.schedule()
        sampled = engine.step(rows).sampled
        self.is_stepping = True
        self.later(0.005 + 0.001 * len(rows), lambda: self._pass_done(probe, rows, sampled))

    def _pass_done(self, probe: PassProbe, rows: list[ScheduledRow], sampled: list[SampledToken | None]) -> None:
        self.is_stepping = False
        for answer in probe.completed(rows, sampled, self.sim.now):
            self.to_router(answer)
        self.wake(self.sim.now)

    def _turn(self, life: int, planned_s: float) -> None:
        if not self.is_alive or life != self.num_lives or self.next_turn_s != planned_s:
            return
        if self.is_stepping:
            self.next_turn_s = None
            return
        if self.sim.now < self.paused_until_s:
            self.next_turn_s = None
            self.wake(self.paused_until_s)
            return
        self.next_turn_s = None
        if self.sim.now < self.hung_until_s:
            self.is_stepping = True
            self.later(self.hung_until_s - self.sim.now, self._come_to)
            return
        self.cluster.touched.add(self)
        self.progress += 1
        inbox, self.inbox = self.inbox, []
        for action in inbox:
            action()
        self.turn()
        self.ownership.prune(self.request_ids)

    def _on_control(self, link: SimulatedLink, worker: WorkerId, message: Message) -> None:
        if worker != link.worker:
            return
        self.heard = link.router
        match message:
            case Introduce():
                if link.is_joined:
                    link.is_joined = False
                    link.worker = self._new_incarnation()
                    self.reset(self.ownership.orphan(link.router))
                    self._say_hello(link, self.num_lives)
            case Welcome():
                link.is_joined = True
                known, link.router_incarnation = link.router_incarnation, message.router_incarnation
                if known not in (None, message.router_incarnation):
                    self.reset(self.ownership.orphan(link.router))
            case _:
                self.ownership.note(message, link.router)
                self.on_router(message)

    def _new_incarnation(self) -> WorkerId:
        self.num_incarnations += 1
        return WorkerId(self.name, f"{self.num_lives}.{self.num_incarnations}")

    def _say_hello(self, link: SimulatedLink, life: int) -> None:
        if self.is_alive and life == self.num_lives and not link.is_joined:
            self._send(link, self.greeting())
            self.later(2.0, lambda: self._say_hello(link, life))

    def _beat(self, link: SimulatedLink, life: int) -> None:
        if link.is_joined:
            if not self.is_stepping and self.sim.now >= self.paused_until_s:
                self.progress += 1  # the loop turns twice a second, work or none
            self._send(link, self.heartbeat())
        self.later(0.5, lambda: self._beat(link, life))
