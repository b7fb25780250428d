"""Simulated processes around the workers' real cores: life and death, the control link, the turns of their loops."""

from collections.abc import Callable
from typing import Protocol

from simulated_network import Simulation
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import Heartbeat, Hello, Introduce, Leaving, Message, SampledToken, Welcome
from twinpool.decode_worker import core as decode
from twinpool.engine.fake import FakeEngine
from twinpool.engine.probe import PassProbe
from twinpool.engine.sequence import ScheduledRow, StepOutput
from twinpool.kvtransfer.frames import Ack, Credit, DataMessage, KVFrame, Reject, checksum
from twinpool.kvtransfer.sender import Closed, Sender, SenderLimits, SendFrame, SendMessage
from twinpool.prefill_worker import core as prefill

LEASE_S = 5.0
BLOCK_SIZE = 4


class Surroundings(Protocol):
    """What a simulated worker sees of the cluster that it is in."""

    sim: Simulation
    touched: "set[SimulatedWorker]"
    num_prompt_blocks: int
    num_completion_blocks: int
    has_fixed_addresses: bool

    def router_gets(self, worker: WorkerId, message: Message) -> None: ...

    def completion_at(self, peer: prefill.Peer) -> "SimulatedCompletionWorker": ...


class SimulatedWorker:
    """What both kinds of process share: life and death, the control link, the turn of the loop."""

    def __init__(self, cluster: Surroundings, name: str) -> None:
        self.cluster, self.sim, self.name = cluster, cluster.sim, name
        self.num_lives = 0
        self.is_alive = False
        self.start()

    def start(self) -> None:
        self.num_lives += 1
        self.is_alive, self.is_joined, self.is_stepping = True, False, False
        self.paused_until_s = 0.0
        self.num_incarnations = 0
        self.progress = 0
        self.router_incarnation: str | None = None
        self.inbox: list[Callable[[], None]] = []
        self.next_turn_s: float | None = None
        self._new_incarnation()
        self.boot()
        self._say_hello(self.num_lives)
        self._beat(self.num_lives)

    def boot(self) -> None:
        raise AssertionError("each kind has its own")

    def crash(self, says_goodbye: bool) -> None:
        """Die and come back a while later; a process that is stopped on purpose says so first."""
        if says_goodbye and self.is_joined:
            self.to_router(Leaving())
        self.is_alive = False
        life = self.num_lives
        self.sim.at(
            self.sim.now + 0.5 + 3 * self.sim.rng.random(), lambda: self.start() if life == self.num_lives else None
        )

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
        worker = self.worker
        self.sim.send(self.name, "router", lambda: self.cluster.router_gets(worker, message))

    def router_says(self, worker: WorkerId, message: Message) -> None:
        if worker == self.worker:
            self.post(lambda: self._on_control(worker, message))

    def turn(self) -> None:
        raise AssertionError("each kind has its own")

    def on_router(self, message: Message) -> None:
        raise AssertionError("each kind has its own")

    def reset(self) -> None:
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
        self.cluster.touched.add(self)
        self.progress += 1
        inbox, self.inbox = self.inbox, []
        for action in inbox:
            action()
        self.turn()

    def _on_control(self, worker: WorkerId, message: Message) -> None:
        if worker != self.worker:
            return
        match message:
            case Introduce():
                if self.is_joined:
                    self.is_joined = False
                    self._new_incarnation()
                    self.reset()
                    self._say_hello(self.num_lives)
            case Welcome():
                self.is_joined = True
                known, self.router_incarnation = self.router_incarnation, message.router_incarnation
                if known not in (None, message.router_incarnation):
                    self.reset()
            case _:
                self.on_router(message)

    def _new_incarnation(self) -> None:
        self.num_incarnations += 1
        self.worker = WorkerId(self.name, f"{self.num_lives}.{self.num_incarnations}")

    def _say_hello(self, life: int) -> None:
        if self.is_alive and life == self.num_lives and not self.is_joined:
            self.to_router(self.greeting())
            self.later(2.0, lambda: self._say_hello(life))

    def _beat(self, life: int) -> None:
        if self.is_joined:
            if not self.is_stepping and self.sim.now >= self.paused_until_s:
                self.progress += 1  # the loop turns twice a second, work or none
            worker, beat = self.worker, self.heartbeat()
            self.sim.send(self.name + "/heartbeat", "router", lambda: self.cluster.router_gets(worker, beat))
        self.later(0.5, lambda: self._beat(life))


class SimulatedPromptWorker(SimulatedWorker):
    def boot(self) -> None:
        self.engine = FakeEngine(num_blocks=self.cluster.num_prompt_blocks, block_size=BLOCK_SIZE)
        limits = prefill.PromptLimits(
            BLOCK_SIZE, self.engine.num_blocks, 4096, 16, self.engine.layout.token_bytes, LEASE_S, 6
        )
        self.core = prefill.PromptCore(limits)
        self.senders: dict[prefill.Peer, SimulatedSender] = {}

    def greeting(self) -> Hello:
        return _hello(self, "PROMPT", 16)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(progress=self.progress, is_busy=self.is_stepping, load=self.core.load())

    def on_router(self, message: Message) -> None:
        self.execute(self.core.on_router(message, self.sim.now))

    def reset(self) -> None:
        self.execute(self.core.reset())

    def turn(self) -> None:
        self.execute(self.core.tick(self.sim.now))
        rows, commands = self.core.schedule(self.sim.now)
        self.execute(commands)
        if not rows and self.core.probe.is_active:
            self.run_pass(self.core.probe, self.engine)
            return
        if not rows:
            deadline = self.core.deadline()
            if deadline is not None:
                self.wake(deadline)
            return
        self.is_stepping = True
        num_tokens = sum(row.end - row.start for row in rows)
        step_s = 0.002 + 0.001 * num_tokens * (1 + self.sim.rng.random())
        num_layers = self.engine.layout.num_layers
        output = self.engine.step(rows)
        targets = [(self.core.peer_of(row.sequence.key), row) for row in rows]
        for layer in range(num_layers):
            for peer, row in targets:
                sender, key, tokens = self.senders[peer], row.sequence.key, range(row.start, row.end)
                self.later(
                    step_s * (layer + 1) / (num_layers + 1),
                    lambda s=sender, k=key, n=layer, t=tokens: s.do(lambda: s.core.layer_written(k, n, t)),
                )
        self.later(step_s, lambda: self._step_done(rows, output))

    def _step_done(self, rows: list[ScheduledRow], output: StepOutput) -> None:
        self.is_stepping = False
        self.execute(self.core.completed(rows, output, self._num_arrived, self.sim.now))
        self.wake(self.sim.now)

    def _num_arrived(self, key: tuple[str, int]) -> int:
        return self.senders[self.core.peer_of(key)].core.num_arrived_bytes(key)

    def execute(self, commands: list[prefill.PromptCommand]) -> None:
        for command in commands:
            match command:
                case prefill.ToRouter():
                    self.to_router(command.message)
                case prefill.OpenTransfer():
                    peer = command.prefill.receiver_addresses
                    sender = self.senders.setdefault(peer, SimulatedSender(self, peer))
                    sender.tables[command.key] = command.block_table
                    grant = command.prefill
                    sender.core.open(
                        command.key,
                        grant.generation,
                        grant.credit_bytes,
                        grant.num_cached_tokens,
                        grant.arrived_tokens,
                    )
                case prefill.TimeKV():
                    self._time_transfer(command)
                case prefill.FinishTransfer():
                    sender = self.senders[command.peer]
                    sender.do(lambda s=sender, c=command: s.core.finish(c.key, c.first_output))
                case prefill.AbortTransfer():
                    sender = self.senders[command.peer]
                    sender.do(lambda s=sender, c=command: s.core.abort(c.key, c.reason, c.is_finished))
                case prefill.ForgetPeer():
                    sender = self.senders.pop(command.peer, None)
                    if sender is not None:
                        sender.do(sender.core.peer_gone)

    def _time_transfer(self, command: prefill.TimeKV) -> None:
        self.core.transfer_began(command.key, self.sim.now)
        self.execute([prefill.OpenTransfer(command.key, command.prefill, command.block_table)])
        sender = self.senders[command.prefill.receiver_addresses]
        for layer in range(self.engine.layout.num_layers):
            sender.do(lambda n=layer: sender.core.layer_written(command.key, n, range(command.num_tokens)))
        sender.do(lambda: sender.core.finish(command.key, command.first_output))

    def check(self) -> None:
        self.core.check()
        for sender in self.senders.values():
            assert sender.core.is_bounded(), "I6: a transfer waits for its peer without a deadline"


class SimulatedSender:
    """One sender thread: never waits for the engine's step."""

    def __init__(self, owner: SimulatedPromptWorker, peer: prefill.Peer) -> None:
        self.owner, self.peer = owner, peer
        self.core = Sender(owner.engine.layout, SenderLimits(max_frame_bytes=640, min_frame_bytes=200, lease_s=LEASE_S))
        self.tables: dict[tuple[str, int], list[int]] = {}
        self.next_pump_s: float | None = None

    def do(self, event: Callable[[], None]) -> None:
        event()
        self.pump()

    def pump(self) -> None:
        sim = self.owner.sim
        while (command := self.core.next_command(sim.now)) is not None:
            match command:
                case SendFrame():
                    self._send_frame(command)
                case SendMessage():
                    self._send(command.message, b"")
                case Closed():
                    del self.tables[command.key]
                    self.owner.post(
                        lambda c=command: self.owner.execute(self.owner.core.on_closed(c, self.owner.sim.now))
                    )
        deadline = self.core.deadline()
        if deadline is not None and (self.next_pump_s is None or deadline < self.next_pump_s):
            self.next_pump_s = deadline
            self.owner.later(deadline - sim.now, self._pump_again)

    def on_reply(self, message: DataMessage) -> None:
        now = self.owner.sim.now
        match message:
            case Credit():
                self.do(lambda: self.core.credited(message.key, message.generation, message.num_bytes, now))
            case Ack():
                self.do(lambda: self.core.acked(message.key, message.generation))
            case Reject():
                self.do(lambda: self.core.rejected(message))
            case _:
                raise AssertionError(f"a receiver does not say {message}")

    def _pump_again(self) -> None:
        self.next_pump_s = None
        self.pump()

    def _send_frame(self, command: SendFrame) -> None:
        layout = self.owner.engine.layout
        payload = bytes(self.owner.engine.gather(self.tables[command.key], command.layers, command.tokens))
        frame = KVFrame(
            request_id=command.key[0],
            attempt=command.key[1],
            generation=command.generation,
            layout=layout.fingerprint,
            sequence=command.sequence,
            layer_start=command.layers.start,
            layer_end=command.layers.stop,
            token_start=command.tokens.start,
            token_end=command.tokens.stop,
            num_bytes=len(payload),
            checksum=checksum(payload),
        )
        self._send(frame, payload)
        self.core.frame_sent(command.key, len(payload), frame.checksum)

    def _send(self, message: DataMessage, payload: bytes) -> None:
        sim, owner = self.owner.sim, self.owner
        if payload and sim.now < sim.healed_s and sim.rng.random() < sim.faults.corruption:
            damaged = bytearray(payload)
            damaged[sim.rng.randrange(len(damaged))] ^= 1 << sim.rng.randrange(8)
            payload = bytes(damaged)
        target = owner.cluster.completion_at(self.peer)
        life = owner.num_lives

        def deliver() -> None:
            if target.data_addresses == self.peer:
                target.post(lambda: target.on_data(self, life, message, payload))

        sim.send(owner.name, target.name, deliver)


class SimulatedCompletionWorker(SimulatedWorker):
    @property
    def data_addresses(self) -> tuple[str, ...]:
        """They live as long as the process, whatever incarnations it has; with a port that was chosen, for longer."""
        life = "" if self.cluster.has_fixed_addresses else f"/{self.num_lives}"
        return (f"tcp://simulated/{self.name}{life}",)

    def boot(self) -> None:
        self.engine = FakeEngine(num_blocks=self.cluster.num_completion_blocks, block_size=BLOCK_SIZE)
        limits = decode.CompletionLimits(BLOCK_SIZE, self.engine.num_blocks, 4096, 8, 6, 2000, LEASE_S)
        self.core = decode.CompletionCore(limits, self.engine.layout)

    def greeting(self) -> Hello:
        return _hello(self, "COMPLETION", 8)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(progress=self.progress, is_busy=self.is_stepping, load=self.core.load())

    def on_router(self, message: Message) -> None:
        self.execute(self.core.on_router(message, self.sim.now), None, b"")

    def reset(self) -> None:
        self.execute(self.core.reset(self.sim.now), None, b"")

    def on_data(self, sender: SimulatedSender, life: int, message: DataMessage, payload: bytes) -> None:
        is_intact = isinstance(message, KVFrame) and checksum(payload) == message.checksum
        commands = self.core.on_data(message, len(payload), is_intact, self.sim.now)
        self.execute(commands, (sender, life), payload)

    def turn(self) -> None:
        self.execute(self.core.tick(self.sim.now), None, b"")
        rows, commands = self.core.schedule()
        self.execute(commands, None, b"")
        if not rows and self.core.probe.is_active:
            self.run_pass(self.core.probe, self.engine)
            return
        if not rows:
            deadline = self.core.deadline()
            if deadline is not None:
                self.wake(deadline)
            return
        self.is_stepping = True
        sampled = self.engine.step(rows).sampled
        self.later(0.005 + 0.002 * len(rows), lambda: self._step_done(rows, sampled))

    def _step_done(self, rows: list[decode.ScheduledRow], sampled: list[SampledToken | None]) -> None:
        self.is_stepping = False
        self.execute(self.core.completed(rows, sampled, self.sim.now), None, b"")
        self.wake(self.sim.now)

    def execute(
        self, commands: list[decode.CompletionCommand], source: tuple[SimulatedSender, int] | None, payload: bytes
    ) -> None:
        for command in commands:
            match command:
                case decode.ToRouter():
                    self.to_router(command.message)
                case decode.WriteKV():
                    holding = self.core.pool.holding(command.key)
                    assert holding is not None, "I2"
                    assert holding.generation == command.generation, "I2"
                    self.engine.scatter(command.block_table, command.layers, command.tokens, memoryview(payload))
                case decode.ToSender():
                    assert source is not None
                    self._reply(source, command.message)

    def _reply(self, source: tuple[SimulatedSender, int], message: DataMessage) -> None:
        sender, life = source
        owner = sender.owner

        def deliver() -> None:
            if owner.is_alive and owner.num_lives == life:
                owner.later(0.0, lambda: sender.on_reply(message))

        self.sim.send(self.name, owner.name, deliver)

    def check(self) -> None:
        self.core.check()
        if len(self.core.receiver):
            assert self.core.receiver.deadline() is not None, "I6: a grant without a lease"


def _hello(worker: SimulatedPromptWorker | SimulatedCompletionWorker, role: str, max_num_batched_tokens: int) -> Hello:
    return Hello(
        role=role,
        pid=1,
        host="simulated",
        identity=worker.engine.identity,
        block_size=BLOCK_SIZE,
        num_blocks=worker.engine.num_blocks,
        max_model_len=4096,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=6,
        data_addresses=worker.data_addresses if isinstance(worker, SimulatedCompletionWorker) else (),
    )
