"""What a COMPLETION worker decides. Pure: messages and step results in, commands out, the clock an argument.

A request's life here:
1. GrantRequest: blocks for the prompt, and for the token behind it if there can be one, are reserved under a new
   generation, or the answer is Busy.
2. Frames come; each is checked by the receiver, and its bytes are written only under the current generation.
3. Done verified: the sequence joins the running batch with its first token.
4. Every step's tokens go to the router. When blocks run out, the newest sequence is handed back, never lost.
5. When its PROMPT worker dies under way, what has arrived waits, under its lease, for the attempt that goes on.
6. It ends by stop token, length, Cancel, or an expired lease; its blocks are free at once.
"""

import math
from collections.abc import Collection, Sequence as AnySequence
from dataclasses import dataclass

from ..cluster.protocol.messages import (
    MAX_SEQUENCES_PER_MESSAGE,
    Busy,
    Cancel,
    DecodeStages,
    Failed,
    Granted,
    GrantRequest,
    Handback,
    Load,
    Message,
    Renew,
    SampledToken,
    SequenceTokens,
    TimePasses,
    Tokens,
    Unknown,
)
from ..engine.block_pool import BlockPool, Owner, blocks_for
from ..engine.decode_scheduler import DecodeScheduler
from ..engine.probe import PassProbe
from ..engine.sequence import ScheduledRow, Sequence
from ..engine.stopping import finish_reason
from ..kvtransfer.frames import Cancelled, DataMessage, Done, KVFrame
from ..kvtransfer.layout import KVLayout
from ..kvtransfer.receiver import Complete, Receiver, ReceiverCommand, Released, Reply, TransferFailed, Write


@dataclass(frozen=True)
class CompletionLimits:
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    credit_bytes: int
    lease_s: float


@dataclass(frozen=True)
class ToRouter:
    message: Message


@dataclass(frozen=True)
class WriteKV:
    """Copy the payload of the frame just handled into these blocks."""

    key: Owner
    generation: int
    block_table: AnySequence[int]
    layers: range
    tokens: range


@dataclass(frozen=True)
class ToSender:
    """Answer the peer whose data message was just handled."""

    message: DataMessage


CompletionCommand = ToRouter | WriteKV | ToSender


@dataclass
class Held:
    """A granted or running request."""

    sequence: Sequence
    expires_at: float
    deadline_s: float = math.inf  # nobody wants the answer any more
    done: Done | None = None
    last_kv_s: float = 0.0
    is_announced: bool = False  # the router has been sent its first token from here


class CompletionCore:
    def __init__(self, limits: CompletionLimits, layout: KVLayout) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.scheduler = DecodeScheduler(self.pool, limits.block_size, limits.max_num_batched_tokens)
        self.receiver = Receiver(layout, limits.lease_s)
        self.probe = PassProbe(self.pool, limits)
        self._held: dict[Owner, Held] = {}
        self._num_preemptions = 0

    def on_router(self, message: Message, now: float) -> list[CompletionCommand]:
        match message:
            case GrantRequest():
                return self._grant(message, now)
            case TimePasses():
                return [ToRouter(failed) for failed in self.probe.begin(message, self._is_idle, now)]
            case Cancel():
                self.probe.stop(message.request_id)
                return self._cancel((message.request_id, message.attempt), message.sender_is_active, now)
            case Renew():
                return self._renew(message, now)
            case _:
                return []

    def on_data(self, message: Message, num_bytes: int, is_intact: bool, now: float) -> list[CompletionCommand]:
        match message:
            case KVFrame():
                commands = self.receiver.frame(message, num_bytes, is_intact, now)
            case Done():
                commands = self.receiver.done(message)
            case Cancelled():
                commands = self.receiver.cancelled(message)
            case _:
                commands = []
        return self._apply(commands, now)

    def reset(self, request_ids: Collection[str], now: float) -> list[CompletionCommand]:
        """Drop these: the router that asked for them is gone. Transfers wait for their senders to stop."""
        for request_id in request_ids:
            self.probe.stop(request_id)
        keys = [key for key in self._held if key[0] in request_ids]
        return [command for key in keys for command in self._cancel(key, True, now)]

    def tick(self, now: float) -> list[CompletionCommand]:
        """Expire transfers without frames, sequences that the router did not renew, and those whose time has passed.

        Call it before every step. A transfer that comes too late is the router's and its sender's to stop.
        """
        commands = self._apply(self.receiver.expire(now), now)
        commands += [ToRouter(failed) for failed in self.probe.tick(self._is_idle, now)]
        started = {key: held for key, held in self._held.items() if held.done is not None}
        for key in [key for key, held in started.items() if now >= held.deadline_s]:
            commands += [_expired(key), *self._cancel(key, False, now)]
        for key in [key for key, held in started.items() if now >= held.expires_at and key in self._held]:
            commands.append(self._failed(key, "the router did not renew its lease"))
            commands += self._cancel(key, False, now)
        return commands

    def schedule(self) -> tuple[list[ScheduledRow], list[CompletionCommand]]:
        """Return the next step's rows; sequences that lost their blocks are handed back to the router."""
        rows, preempted = self.scheduler.schedule()
        return rows, [self._hand_back(sequence) for sequence in preempted]

    def completed(
        self, rows: list[ScheduledRow], sampled: AnySequence[SampledToken | None], now: float
    ) -> list[CompletionCommand]:
        """Account for a step and report its tokens."""
        reports: list[SequenceTokens] = []
        for row, token in zip(rows, sampled, strict=True):
            assert token is not None, "every decode row samples"
            row.sequence.num_computed_tokens = row.end
            row.sequence.token_ids.append(token.token)
            reports.append(self._report(row.sequence, token, now))
        return self._report_all(reports)

    def failed(
        self, rows: list[ScheduledRow], reason: str, now: float, is_retryable: bool = True
    ) -> list[CompletionCommand]:
        """The step raised, or could not sample these: their requests fail, the worker lives."""
        commands: list[CompletionCommand] = []
        for row in rows:
            commands.append(self._failed(row.sequence.key, reason, is_retryable))
            commands += self._cancel(row.sequence.key, False, now)
        return commands

    def request_ids(self) -> set[str]:
        """Return the requests and probes that something is held for."""
        return {request_id for request_id, _ in (*self._held, *self.probe.owners())}

    def deadline(self) -> float | None:
        started = [held for held in self._held.values() if held.done is not None]
        deadlines = [min(held.expires_at, held.deadline_s) for held in started]
        transfer = self.receiver.deadline()
        return min(deadlines if transfer is None else [*deadlines, transfer], default=None)

    def load(self) -> Load:
        return Load(
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_granted_blocks=self.pool.num_used("granted"),
            num_sequences=len(self.scheduler),
            num_transfers=len(self.receiver),
            num_preemptions=self._num_preemptions,
            num_dropped_frames=self.receiver.num_dropped_frames,
        )

    def check(self) -> None:
        """Assert I1, and that blocks, transfers and sequences agree with each other."""
        self.pool.check()
        known = {*self.receiver.keys(), *self.scheduler.keys(), *self.probe.owners()}
        assert set(self.pool.owners()) == known, "blocks of a request that nobody knows, or a request without blocks"

    @property
    def _is_idle(self) -> bool:
        return not self._held and not len(self.receiver)

    def _grant(self, message: GrantRequest, now: float) -> list[CompletionCommand]:
        key = (message.request_id, message.attempt)
        if key in self._held:
            return []  # delivered twice
        refusal, num_blocks = self._refusal(message), blocks_for(_num_tokens(message), self.limits.block_size)
        arrived = () if refusal else self._adopt(message, num_blocks, now)
        if arrived:
            return [self._granted(message, arrived, now)]
        given_up = self._cancel((message.request_id, message.resumed_attempt), False, now)
        if refusal is not None:
            return [*given_up, refusal]
        if not self._has_room(num_blocks):  # what one router measures here does not keep another one out
            given_up += [ToRouter(failed) for failed in self.probe.tick(False, now)]
        if not (self._has_room(num_blocks) and self.pool.allocate(key, num_blocks, "granted")):
            busy = Busy(request_id=key[0], attempt=key[1], num_free_blocks=self.pool.num_free)
            return [*given_up, ToRouter(busy)]
        return [*given_up, self._granted(message, (), now)]

    def _refusal(self, message: GrantRequest) -> ToRouter | None:
        """Return why this request will never be served here; None when there only has to be room."""
        key, num_tokens, length = (message.request_id, message.attempt), _num_tokens(message), len(message.token_ids)
        if message.remaining_ms == 0:
            return _expired(key)
        fits = blocks_for(num_tokens, self.limits.block_size) <= self.pool.num_blocks
        if message.num_output_tokens < length and num_tokens <= self.limits.max_model_len and fits:
            return None
        reason = f"{length} tokens do not fit: context {self.limits.max_model_len}, {self.pool.num_blocks} blocks"
        failed = Failed(request_id=key[0], attempt=key[1], reason=reason, is_retryable=False, is_too_long=True)
        return ToRouter(failed)

    def _adopt(self, message: GrantRequest, num_blocks: int, now: float) -> tuple[int, ...]:
        """Give the new attempt what the resumed one has; return, for each layer, the first token that is missing.

        Returns nothing when there is nothing to go on from, or no room for the tokens that have come since.
        """
        old, key = (message.request_id, message.resumed_attempt), (message.request_id, message.attempt)
        held = self._held.get(old)
        if held is None or not self.receiver.is_open(old):
            return ()
        known = held.sequence.token_ids
        num_more = max(0, num_blocks - len(held.sequence.block_table))
        has_room = not num_more or self.scheduler.has_headroom(num_more)
        if known != list(message.token_ids[: len(known)]) or not has_room:
            return ()
        self.pool.extend(old, num_more)
        del self._held[old]
        holding = self.pool.adopt(key, old)
        return self.receiver.adopt(key, old, holding.generation, len(message.token_ids), now)

    def _granted(self, message: GrantRequest, arrived: tuple[int, ...], now: float) -> CompletionCommand:
        """Hold the request, whose blocks are reserved; `arrived`: see `_adopt`."""
        key, length = (message.request_id, message.attempt), len(message.token_ids)
        holding = self.pool.holding(key)
        assert holding is not None
        sequence = Sequence(
            *key,
            token_ids=list(message.token_ids),
            num_prompt_tokens=length - message.num_output_tokens,
            sampling=message.sampling,
            arrival_order=message.arrival_order,
            block_table=holding.blocks,
        )
        deadline_s = math.inf if message.remaining_ms is None else now + message.remaining_ms / 1000
        self._held[key] = Held(sequence, now + self.limits.lease_s, deadline_s)
        if not arrived:
            self.receiver.grant(key, holding.generation, range(length), now)
        granted = Granted(
            request_id=key[0],
            attempt=key[1],
            generation=holding.generation,
            credit_bytes=self.limits.credit_bytes,
            arrived_tokens=arrived,
            num_free_blocks=self.pool.num_free,
        )
        return ToRouter(granted)

    def _has_room(self, num_blocks: int) -> bool:
        return len(self._held) < self.limits.max_num_seqs and self.scheduler.has_headroom(num_blocks)

    def _apply(self, commands: list[ReceiverCommand], now: float) -> list[CompletionCommand]:
        result: list[CompletionCommand] = []
        for command in commands:
            match command:
                case Write():
                    holding = self.pool.holding(command.key)
                    assert holding is not None and holding.generation == command.generation, "I2"
                    table = holding.blocks
                    result.append(WriteKV(command.key, command.generation, table, command.layers, command.tokens))
                case Reply():
                    result.append(ToSender(command.message))
                case Complete():
                    result += self._start(command.key, command.done, now)
                case TransferFailed():
                    result.append(self._failed(command.key, command.reason))
                case Released():
                    self._held.pop(command.key, None)
                    self.pool.release(command.key)
        return result

    def _start(self, key: Owner, done: Done, now: float) -> list[CompletionCommand]:
        held = self._held[key]
        sequence = held.sequence
        held.done, held.last_kv_s = done, now  # its lease is the router's to stretch, who may be dead by now
        sequence.num_computed_tokens = len(sequence.token_ids)
        sequence.token_ids.append(done.token.token)
        self.pool.promote(key)
        self.scheduler.add(sequence)
        return []

    def _report(self, sequence: Sequence, token: SampledToken, now: float) -> SequenceTokens:
        held = self._held[sequence.key]
        assert held.done is not None
        num_outputs = sequence.num_output_tokens
        is_first, held.is_announced = not held.is_announced, True
        reason = finish_reason(token.token, num_outputs, sequence.sampling)
        if reason is None and len(sequence.token_ids) >= self.limits.max_model_len:
            reason = "length"
        if reason is not None:
            self._forget(sequence.key)
        return SequenceTokens(
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            position=num_outputs - (2 if is_first else 1),
            tokens=(held.done.token, token) if is_first else (token,),
            finish_reason=reason,
            stages=DecodeStages(since_last_kv_s=now - held.last_kv_s, prefill=held.done.stages) if is_first else None,
        )

    def _report_all(self, reports: list[SequenceTokens]) -> list[CompletionCommand]:
        size = MAX_SEQUENCES_PER_MESSAGE
        groups = [tuple(reports[i : i + size]) for i in range(0, len(reports), size)]
        return [ToRouter(Tokens(sequences=group, num_free_blocks=self.pool.num_free)) for group in groups]

    def _renew(self, message: Renew, now: float) -> list[CompletionCommand]:
        missing: list[Owner] = []
        for key in (*message.requests, *message.prefilled):
            held = self._held.get(key)
            if held is None or not (held.done is not None or self.receiver.is_open(key)):
                missing.append(key)
                continue
            held.expires_at = now + self.limits.lease_s
        for key in message.requests:
            self.receiver.renew(key, now)
        return [ToRouter(Unknown(requests=tuple(missing)))] if missing else []

    def _cancel(self, key: Owner, sender_is_active: bool, now: float) -> list[CompletionCommand]:
        """Give up `key`: a running sequence at once, a transfer when its sender has stopped. Unknown is fine."""
        held = self._held.get(key)
        if held is not None and held.done is not None:
            self._forget(key)
            return []
        return self._apply(self.receiver.cancel(key, sender_is_active), now)

    def _forget(self, key: Owner) -> None:
        self.scheduler.remove(key)
        self.pool.release(key)
        self._held.pop(key, None)

    def _hand_back(self, sequence: Sequence) -> CompletionCommand:
        self._num_preemptions += 1
        del self._held[sequence.key]
        return ToRouter(
            Handback(
                request_id=sequence.request_id,
                attempt=sequence.attempt,
                num_output_tokens=sequence.num_output_tokens,
                num_free_blocks=self.pool.num_free,
            )
        )

    def _failed(self, key: Owner, reason: str, is_retryable: bool = True) -> ToRouter:
        failed = Failed(request_id=key[0], attempt=key[1], reason=reason[:1024], is_retryable=is_retryable)
        return ToRouter(failed)


def _num_tokens(message: GrantRequest) -> int:
    """Return the room that is asked for: the prompt, and the token behind it if there can be one."""
    is_last = message.num_output_tokens + 1 >= message.sampling.max_tokens  # it will end with the first token
    return len(message.token_ids) + (0 if is_last else 1)


def _expired(key: Owner) -> ToRouter:
    reason = "the time for the answer has passed"
    return ToRouter(Failed(request_id=key[0], attempt=key[1], reason=reason, is_retryable=False, is_expired=True))
