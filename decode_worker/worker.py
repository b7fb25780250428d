"""The COMPLETION process: a plain loop around decode_worker.core, one engine, and the receiving end of the KV.

One turn: take what came (router, frames), expire what is overdue, run one decode step, report its tokens.
Frames are copied into the cache between steps, by the loop itself: their generation is checked right before the copy.
"""

import logging
import os
import time
from functools import partial

import zmq

from ..cluster.role import RoleArguments, end_stuck_process
from ..engine.control import Control
from ..engine.intake import refusal
from ..engine.loading import hello
from ..engine.ownership import Orphaned
from ..engine.sequence import Engine, ScheduledRow
from ..engine.timing import run_pass
from ..kvtransfer.credits import HeldCredits
from ..kvtransfer.frames import Credit, DataMessage, Received
from ..kvtransfer.open_channel import ChannelOpener
from ..kvtransfer.transport import advertised
from ..kvtransfer.zmq_channel import ZmqReceiver
from .core import CompletionCommand, CompletionCore, CompletionLimits, ToRouter, ToSender, WriteKV

log = logging.getLogger(__name__)

MAX_FRAMES_A_TURN = 16  # so that a burst of KV never holds up the running streams for long


class CompletionWorker:
    def __init__(self, arguments: RoleArguments, engine: Engine) -> None:
        spec = arguments.spec
        self._engine = engine
        self._core = CompletionCore(
            CompletionLimits(
                block_size=engine.block_size,
                num_blocks=engine.num_blocks,
                max_model_len=engine.max_model_len,
                max_num_batched_tokens=spec.completion.engine.max_num_batched_tokens,
                max_num_seqs=spec.completion.engine.max_num_seqs,
                credit_bytes=spec.transfer.credit_bytes,
                lease_s=spec.liveness.lease_s,
            ),
            engine.layout,
        )
        if spec.completion.engine.poison_freed_blocks:
            self._core.pool.on_freed = engine.poison
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ipc_path = arguments.run_folder / f"{arguments.name}-{os.getpid()}.kv"
        opener = ChannelOpener(spec.transfer, spec.liveness, engine.device_name, end_stuck_process)
        self._receiver = opener.open_receiver(
            partial(
                ZmqReceiver,
                self._context,
                ipc_path,
                spec.transfer.max_frame_bytes,
                arguments.data_host,
                arguments.data_port,
                arguments.keys,
            )
        )
        self._credits = HeldCredits()
        self._ipc_path = ipc_path
        addresses = advertised(self._receiver.addresses, arguments.advertise)
        greeting = hello(engine, spec.completion.engine, "COMPLETION", spec.transfer.transport, addresses)
        self._control = Control(arguments, self._context, greeting, self._core.load(), self._core.request_ids)

    def run(self) -> int:
        """Serve until SIGTERM or refusal; return the exit code."""
        was_busy = False
        while self._control.exit_code is None:
            self._control.wait(was_busy, self._core.deadline(), *self._receiver.sources)
            self._take_messages()
            has_more_frames = self._take_frames()
            self._execute(self._core.tick(time.monotonic()), None)
            rows, commands = self._core.schedule()
            self._execute(commands, None)
            is_busy = bool(rows) or self._core.probe.is_active
            self._control.turned(self._core.load(), is_busy)
            if rows:
                self._step(rows)
            elif self._core.probe.is_active:
                run_pass(self._core.probe, self._engine, self._control)
            was_busy = is_busy or has_more_frames
        self._close()
        return self._control.exit_code

    def _take_messages(self) -> None:
        for message in self._control.messages():
            now = time.monotonic()
            if isinstance(message, Orphaned):
                self._execute(self._core.reset(message.request_ids, now), None)
            elif (refused := refusal(message, self._engine.vocab_size)) is not None:
                self._control.send(refused)
            else:
                self._execute(self._core.on_router(message, now), None)

    def _take_frames(self) -> bool:
        """Handle a bounded number of data messages; True when there may be more."""
        num_taken = 0
        while num_taken < MAX_FRAMES_A_TURN and (received := self._receiver.receive()) is not None:
            num_taken += 1
            now = time.monotonic()
            commands = self._core.on_data(received.message, received.payload.nbytes, received.is_intact, now)
            self._execute(commands, received)
        for peer, credit in self._credits.take():
            self._receiver.reply(peer, credit)
        return num_taken == MAX_FRAMES_A_TURN

    def _reply(self, peer: bytes, message: DataMessage) -> None:
        due = self._credits.add(peer, message) if isinstance(message, Credit) else message
        if due is not None:
            self._receiver.reply(peer, due)

    def _step(self, rows: list[ScheduledRow]) -> None:
        try:
            output = self._engine.step(rows, lambda _: self._control.moved())
        except Exception as error:
            log.exception("a decode step failed")
            reason = f"decode failed: {type(error).__name__}"
            self._execute(self._core.failed(rows, reason, time.monotonic()), None)
            return
        now = time.monotonic()
        for i, reason in output.failures.items():
            self._execute(self._core.failed([rows[i]], reason, now, is_retryable=False), None)
        rows, output = output.without_failures(rows)
        self._execute(self._core.completed(rows, output.sampled, now), None)

    def _execute(self, commands: list[CompletionCommand], received: Received | None) -> None:
        """Carry out `commands`; `received` is the data message that they answer."""
        for command in commands:
            match command:
                case ToRouter():
                    self._control.send(command.message)
                case WriteKV():
                    assert received is not None
                    self._engine.scatter(command.block_table, command.layers, command.tokens, received.payload)
                case ToSender():
                    assert received is not None
                    self._reply(received.peer, command.message)

    def _close(self) -> None:
        self._receiver.close()
        self._control.close()
        self._context.term()
        self._ipc_path.unlink(missing_ok=True)
