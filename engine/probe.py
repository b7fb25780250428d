"""Timed passes: what a worker does when it is asked how long its passes take. Pure; the clock is an argument.

A pass is a turn of the worker's own loop, host time included: the loop runs the probe's rows when its scheduler has
none, and a pass lasts from the end of the one before to its own end. The same pass runs each time, because sequences
are not advanced in between. One probe at a time, on a worker that has nothing else to do; other work ends it.
Knows no role: a pass may mix prompts and decode rows on either kind of worker.
"""

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from typing import Protocol

from ..cluster.protocol.codec import encode
from ..cluster.protocol.messages import (
    MAX_SEQUENCES_PER_MESSAGE,
    PROBE_ATTEMPT,
    Failed,
    FirstToken,
    Message,
    PassesTimed,
    PrefillStages,
    SampledToken,
    SamplingParams,
    SequenceTokens,
    TimePasses,
    Tokens,
)
from .block_pool import BlockPool, Owner, blocks_for
from .decode_scheduler import DecodeScheduler
from .prefill_scheduler import PrefillScheduler
from .sequence import ScheduledRow, Sequence

NUM_TOKEN_IDS = 64  # no vocabulary is smaller
PROBE_SAMPLING = SamplingParams(max_tokens=2**31 - 1, temperature=0.0)


class ProbeLimits(Protocol):
    """What of a worker's limits a pass has to keep."""

    @property
    def block_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...


@dataclass
class RunningProbe:
    message: TimePasses
    prompts: PrefillScheduler
    decodes: DecodeScheduler
    sequences: list[Sequence]
    began_s: float
    last_s: float | None = None  # end of the latest pass, or when everything was ready for the first
    pass_s: list[float] = field(default_factory=list[float])  # warm-up included


class PassProbe:
    def __init__(self, pool: BlockPool, limits: ProbeLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._running: RunningProbe | None = None
        self._latest_id: str | None = None

    @property
    def is_active(self) -> bool:
        return self._running is not None

    def owners(self) -> set[Owner]:
        return {sequence.key for sequence in self._running.sequences} if self._running else set()

    def begin(self, message: TimePasses, is_idle: bool, now: float) -> list[Failed]:
        """Take the blocks and start, or say why not."""
        if message.probe_id == self._latest_id:
            return []  # delivered twice
        self._latest_id = message.probe_id
        problem = self._problem(message)
        if problem is not None:
            return [_failed(message, problem, is_retryable=False)]
        if not is_idle or self._running is not None or self._num_blocks(message) > self._pool.num_free:
            return [_failed(message, "the worker is not idle", is_retryable=True)]
        size, budget = self._limits.block_size, self._limits.max_num_batched_tokens
        self._running = RunningProbe(
            message,
            PrefillScheduler(self._pool, size, budget),
            DecodeScheduler(self._pool, size, budget),
            [self._sequence(message.probe_id, number, sum(row)) for number, row in enumerate(message.rows)],
            now,
        )
        return []

    def unwritten(self) -> list[tuple[Sequence, int]]:
        """Return the sequences with the number of tokens whose KV must be there before the first pass."""
        if self._running is None or self._running.last_s is not None:
            return []
        return [(s, cached) for s, (cached, _) in zip(self._running.sequences, self._running.message.rows, strict=True)]

    def written(self, now: float) -> None:
        """Everything that counts as cached has been written."""
        assert self._running is not None
        self._running.last_s = now

    def tick(self, is_idle: bool, now: float) -> list[Failed]:
        """Give up when other work has come, or when the time is up."""
        if self._running is None:
            return []
        if not is_idle:
            return [self.failed("other work came meanwhile", is_retryable=True)]
        message = self._running.message
        if now - self._running.began_s < message.limit_s:
            return []
        num_passes = f"{len(self._running.pass_s)} of {message.num_warmup + message.num_repeats} passes"
        return [self.failed(f"only {num_passes} ended within the {message.limit_s:g} s allowed")]

    def schedule(self) -> list[ScheduledRow]:
        """Return the rows of the next pass, prompts first."""
        running = self._running
        assert running is not None and running.last_s is not None
        for sequence, (cached, new) in zip(running.sequences, running.message.rows, strict=True):
            sequence.num_computed_tokens = cached
            if _is_decode(cached, new):
                running.decodes.add(sequence)
            else:
                running.prompts.add(sequence, running.last_s, tokens_per_s=1000.0)
        decodes, _ = running.decodes.schedule()
        return [*running.prompts.schedule(), *decodes]

    def completed(
        self, rows: AnySequence[ScheduledRow], sampled: AnySequence[SampledToken | None], now: float
    ) -> list[PassesTimed]:
        """Account for a pass as a worker does, reports included; return the answer after the last one."""
        running = self._running
        assert running is not None and running.last_s is not None
        running.pass_s.append(now - running.last_s)
        running.last_s = now
        running.prompts.completed([row for row in rows if not _is_decode(row.start, row.end - row.start)])
        for report in _reports(rows, sampled):
            encode(report)  # as a worker's link does; nobody waits for this one
        message = running.message
        if len(running.pass_s) < message.num_warmup + message.num_repeats:
            return []
        self.stop()
        return [PassesTimed(probe_id=message.probe_id, pass_s=tuple(running.pass_s[message.num_warmup :]))]

    def failed(self, reason: str, is_retryable: bool = False) -> Failed:
        """End the probe without a result."""
        assert self._running is not None
        message = self._running.message
        self.stop()
        return _failed(message, reason, is_retryable)

    def stop(self, probe_id: str | None = None) -> None:
        """Drop what runs (only that probe, if one is named) and release its blocks. Nothing running is fine."""
        if self._running is None or probe_id not in (None, self._running.message.probe_id):
            return
        for sequence in self._running.sequences:
            self._pool.release(sequence.key)
        self._running = None

    def _problem(self, message: TimePasses) -> str | None:
        limits = self._limits
        num_tokens, longest = sum(new for _, new in message.rows), max(sum(row) for row in message.rows)
        num_blocks = self._num_blocks(message)
        if len(message.rows) > limits.max_num_seqs:
            return f"{len(message.rows)} rows; max_num_seqs is {limits.max_num_seqs}"
        if num_tokens > limits.max_num_batched_tokens:
            return f"{num_tokens} new tokens in a pass; max_num_batched_tokens is {limits.max_num_batched_tokens}"
        if longest > limits.max_model_len:
            return f"a row of {longest} tokens; max_model_len is {limits.max_model_len}"
        if num_blocks > self._pool.num_blocks:
            return f"the rows take {num_blocks} KV blocks; the worker has {self._pool.num_blocks}"
        return None

    def _num_blocks(self, message: TimePasses) -> int:
        return sum(blocks_for(sum(row), self._limits.block_size) for row in message.rows)

    def _sequence(self, probe_id: str, number: int, length: int) -> Sequence:
        token_ids = [(number + i) % NUM_TOKEN_IDS for i in range(length)]
        sequence = Sequence(probe_id, number, token_ids, length, PROBE_SAMPLING, arrival_order=number)
        holding = self._pool.allocate(sequence.key, blocks_for(length, self._limits.block_size), "sequence")
        assert holding is not None, "as many blocks were free a moment ago"
        sequence.block_table = holding.blocks
        return sequence


def _is_decode(cached: int, new: int) -> bool:
    return cached > 0 and new == 1


def _failed(message: TimePasses, reason: str, is_retryable: bool) -> Failed:
    return Failed(request_id=message.probe_id, attempt=PROBE_ATTEMPT, reason=reason[:1024], is_retryable=is_retryable)


def _reports(rows: AnySequence[ScheduledRow], sampled: AnySequence[SampledToken | None]) -> list[Message]:
    """Return what a worker would tell the router after this pass."""
    reports: list[Message] = []
    decoded: list[SequenceTokens] = []
    for row, token in zip(rows, sampled, strict=True):
        assert token is not None, "every row of a probe ends its prompt or decodes"
        request_id, attempt = row.sequence.key
        if _is_decode(row.start, row.end - row.start):
            decoded.append(SequenceTokens(request_id=request_id, attempt=attempt, position=row.end, tokens=(token,)))
        else:
            stages = _stages(row)
            reports.append(FirstToken(request_id=request_id, attempt=attempt, position=0, token=token, stages=stages))
    size = MAX_SEQUENCES_PER_MESSAGE
    groups = [tuple(decoded[i : i + size]) for i in range(0, len(decoded), size)]
    return [*reports, *(Tokens(sequences=group, num_free_blocks=0) for group in groups)]


def _stages(row: ScheduledRow) -> PrefillStages:
    return PrefillStages(
        queue_s=0.0, prefill_s=0.0, num_computed_tokens=row.end, num_kv_bytes=0, num_kv_bytes_arrived=0
    )
