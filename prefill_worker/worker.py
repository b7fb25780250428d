"""The PROMPT process: a plain loop around prefill_worker.core, one engine, and a sender thread a peer.

One turn: take what came (router, closed transfers), expire what is overdue, run one step of chunks, report.
During a step every layer is announced to the sender threads as soon as its keys and values are written.
"""

import logging
import time
from functools import partial

import zmq

from ..cluster.protocol.mailbox import Mailbox
from ..cluster.protocol.messages import Prefill
from ..cluster.role import RoleArguments, end_stuck_process
from ..engine.control import Control
from ..engine.intake import refusal
from ..engine.loading import hello
from ..engine.ownership import Orphaned
from ..engine.sequence import Engine, ScheduledRow
from ..engine.timing import run_pass, write_kv
from ..kvtransfer.channel import SenderThread
from ..kvtransfer.open_channel import ChannelOpener
from ..kvtransfer.sender import Closed, SenderLimits
from ..kvtransfer.zmq_channel import ZmqSender
from .core import (
    AbortTransfer,
    FinishTransfer,
    ForgetPeer,
    OpenTransfer,
    Peer,
    PromptCommand,
    PromptCore,
    PromptLimits,
    TimeKV,
    ToRouter,
)

log = logging.getLogger(__name__)


class PromptWorker:
    def __init__(self, arguments: RoleArguments, engine: Engine) -> None:
        spec = arguments.spec
        self._transfer = spec.transfer
        self._keys = arguments.keys
        self._lease_s = spec.liveness.lease_s
        self._engine = engine
        self._core = PromptCore(
            PromptLimits(
                block_size=engine.block_size,
                num_blocks=engine.num_blocks,
                max_model_len=engine.max_model_len,
                max_num_batched_tokens=spec.prompt.engine.max_num_batched_tokens,
                kv_bytes_per_token=engine.layout.token_bytes,
                lease_s=spec.liveness.lease_s,
                max_num_seqs=spec.prompt.engine.max_num_seqs,
            )
        )
        if spec.prompt.engine.poison_freed_blocks:
            self._core.pool.on_freed = engine.poison
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closed: Mailbox[Closed] = Mailbox()
        self._senders: dict[Peer, SenderThread] = {}
        self._opener = ChannelOpener(spec.transfer, spec.liveness, engine.device_name, end_stuck_process)
        greeting = hello(engine, spec.prompt.engine, "PROMPT", spec.transfer.transport)
        self._control = Control(arguments, self._context, greeting, self._core.load(), self._core.request_ids)

    def run(self) -> int:
        """Serve until SIGTERM or refusal; return the exit code."""
        was_busy = False
        while self._control.exit_code is None:
            self._control.wait(was_busy, self._core.deadline(), self._closed.fileno())
            self._take_messages()
            self._execute(self._core.tick(time.monotonic()))
            rows, commands = self._core.schedule(time.monotonic())
            self._execute(commands)
            was_busy = bool(rows) or self._core.probe.is_active
            self._control.turned(self._core.load(), was_busy)
            if rows:
                self._step(rows)
            elif self._core.probe.is_active:
                run_pass(self._core.probe, self._engine, self._control)
        self._close()
        return self._control.exit_code

    def _take_messages(self) -> None:
        for closed in self._closed.drain():
            self._execute(self._core.on_closed(closed, time.monotonic()))
        for message in self._control.messages():
            if isinstance(message, Orphaned):
                self._execute(self._core.reset(message.request_ids))
            elif (refused := refusal(message, self._engine.vocab_size)) is not None:
                self._control.send(refused)
            else:
                self._execute(self._core.on_router(message, time.monotonic()))

    def _step(self, rows: list[ScheduledRow]) -> None:
        started_s = time.monotonic()
        try:
            output = self._engine.step(rows, partial(self._layer_written, rows))
        except Exception as error:
            log.exception("a prefill step failed")
            self._execute(self._core.failed(rows, f"prefill failed: {type(error).__name__}"))
            return
        now = time.monotonic()
        self._core.measured(sum(row.end - row.start for row in rows), now - started_s)
        for i, reason in output.failures.items():
            self._execute(self._core.failed([rows[i]], reason, is_retryable=False))
        rows, output = output.without_failures(rows)
        self._execute(self._core.completed(rows, output, self._num_arrived_bytes, now))

    def _layer_written(self, rows: list[ScheduledRow], layer: int) -> None:
        self._control.moved()
        for row in rows:
            key = row.sequence.key
            self._senders[self._core.peer_of(key)].layer_written(key, layer, range(row.start, row.end))

    def _num_arrived_bytes(self, key: tuple[str, int]) -> int:
        return self._senders[self._core.peer_of(key)].num_arrived_bytes(key)

    def _execute(self, commands: list[PromptCommand]) -> None:
        for command in commands:
            match command:
                case ToRouter():
                    self._control.send(command.message)
                case OpenTransfer():
                    prefill = command.prefill
                    self._sender(prefill).open(
                        command.key,
                        prefill.generation,
                        prefill.credit_bytes,
                        prefill.num_cached_tokens,
                        command.block_table,
                        prefill.arrived_tokens,
                    )
                case TimeKV():
                    self._time_transfer(command)
                case FinishTransfer():
                    self._senders[command.peer].finish(command.key, command.first_output)
                case AbortTransfer():
                    self._senders[command.peer].abort(command.key, command.reason, command.is_finished)
                case ForgetPeer():
                    sender = self._senders.pop(command.peer, None)
                    if sender is not None:
                        sender.stop(wait_s=0.0)  # it may be stuck in a send to the dead peer; the loop must not be

    def _time_transfer(self, command: TimeKV) -> None:
        try:
            write_kv(self._engine, command.block_table, command.num_tokens, self._control.moved)
        except Exception as error:
            log.exception("the KV of a timed transfer could not be written")
            failed = Closed(command.key, "failed", f"writing the KV failed: {type(error).__name__}")
            self._execute(self._core.on_closed(failed, time.monotonic()))
            return
        self._core.transfer_began(command.key, time.monotonic())
        self._execute([OpenTransfer(command.key, command.prefill, command.block_table)])
        sender = self._sender(command.prefill)
        for layer in range(self._engine.layout.num_layers):
            sender.layer_written(command.key, layer, range(command.num_tokens))
        sender.finish(command.key, command.first_output)

    def _sender(self, prefill: Prefill) -> SenderThread:
        """Return the thread that sends to this grant's holder; the first transfer to a peer starts it."""
        peer = prefill.receiver_addresses
        if peer not in self._senders:
            keys = None if self._keys is None else self._keys.towards(prefill.receiver.partition("/")[0])
            self._senders[peer] = SenderThread(
                partial(
                    self._opener.open_sender,
                    partial(ZmqSender, self._context, peer, self._transfer.max_frame_bytes, self._lease_s, keys),
                    peer,
                    prefill.receiver,
                ),
                self._engine.layout,
                SenderLimits(self._transfer.max_frame_bytes, self._transfer.min_frame_bytes, self._lease_s),
                self._engine.gather,
                self._closed.put,
                prefill.receiver,
            )
        return self._senders[peer]

    def _close(self) -> None:
        for sender in self._senders.values():
            sender.stop()
        self._control.close()
        self._context.term()
