"""Simulated processes around the workers' real cores, with the sender threads of PROMPT workers."""

from collections.abc import Callable

from simulated_process import SimulatedWorker
from twinpool.cluster.protocol.messages import (
    Heartbeat,
    Hello,
    Message,
    SampledToken,
)
from twinpool.decode_worker import core as decode
from twinpool.engine.fake import FakeEngine
from twinpool.engine.ownership import Orphaned
from twinpool.engine.sequence import ScheduledRow, StepOutput
from twinpool.kvtransfer.frames import Ack, Credit, DataMessage, KVFrame, Reject, checksum
from twinpool.kvtransfer.sender import Closed, Sender, SenderLimits, SendFrame, SendMessage
from twinpool.prefill_worker import core as prefill

LEASE_S = 5.0
BLOCK_SIZE = 4


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

    def reset(self, orphaned: Orphaned) -> None:
        self.execute(self.core.reset(orphaned.request_ids))

    def request_ids(self) -> set[str]:
        return self.core.request_ids()

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
        self.poison_freed(self.core.pool, self.engine)
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
            payload = bytes(damaged)[: sim.rng.choice([None, None, len(damaged) - 1])]
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

    def reset(self, orphaned: Orphaned) -> None:
        self.execute(self.core.reset(orphaned.request_ids, self.sim.now), None, b"")

    def request_ids(self) -> set[str]:
        return self.core.request_ids()

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
        self.poison_freed(self.core.pool, self.engine)
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
