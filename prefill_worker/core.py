"""What a PROMPT worker decides. Pure: messages and step results in, commands out, the clock an argument.

A request's life here:
1. Prefill arrives with a grant; the prompt is queued, a transfer to the grant's holder is opened.
2. Chunks run; each layer's keys and values are announced to the transfer as soon as they are written.
3. The tokens of a prompt that is scored are reported chunk by chunk.
4. The last chunk's token goes to the router at once, and to the COMPLETION worker behind the KV, in Done.
5. The transfer closes (acked, cancelled, failed); only then are the blocks free.
"""

import math
from collections.abc import Callable, Collection, Sequence as AnySequence
from dataclasses import dataclass

from ..cluster.protocol.messages import (
    MAX_SCORES_PER_MESSAGE,
    PROBE_ATTEMPT,
    Cancel,
    Failed,
    FirstToken,
    Load,
    Message,
    PeerGone,
    Prefill,
    PrefillStages,
    PromptScores,
    Renew,
    SampledToken,
    TimePasses,
    TimeTransfer,
    TransferTimed,
    Unknown,
)
from ..engine.block_pool import BlockPool, Owner, blocks_for
from ..engine.prefill_scheduler import PrefillRate, PrefillScheduler
from ..engine.probe import PROBE_SAMPLING, PassProbe
from ..engine.sequence import ScheduledRow, Sequence, StepOutput
from ..engine.stopping import finish_reason
from ..kvtransfer.sender import Closed, FirstOutput

TOO_LATE = "the time for the answer has passed"

Peer = tuple[str, ...]  # a COMPLETION process, by its data addresses: each router has its own name for it


@dataclass(frozen=True)
class PromptLimits:
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    kv_bytes_per_token: int
    lease_s: float
    max_num_seqs: int


@dataclass(frozen=True)
class ToRouter:
    message: Message


@dataclass(frozen=True)
class OpenTransfer:
    key: Owner
    prefill: Prefill
    block_table: AnySequence[int]


@dataclass(frozen=True)
class FinishTransfer:
    key: Owner
    peer: Peer
    first_output: FirstOutput


@dataclass(frozen=True)
class AbortTransfer:
    key: Owner
    peer: Peer
    reason: str
    is_finished: bool = False  # the request ended at its first token


@dataclass(frozen=True)
class ForgetPeer:
    """Close the connection to this COMPLETION worker, and every transfer over it."""

    peer: Peer


@dataclass(frozen=True)
class TimeKV:
    """Write keys and values for `num_tokens` into these blocks, call `transfer_began`, and send them all at once."""

    key: Owner
    prefill: Prefill
    block_table: AnySequence[int]
    num_tokens: int
    first_output: FirstOutput


PromptCommand = ToRouter | OpenTransfer | FinishTransfer | AbortTransfer | ForgetPeer | TimeKV


@dataclass
class PromptJob:
    """One prompt, from Prefill until its transfer is closed."""

    prefill: Prefill
    sequence: Sequence
    expires_at: float
    deadline_s: float = math.inf  # nobody wants the answer any more
    is_open: bool = False  # a transfer exists and has not closed
    is_over: bool = False  # finished or given up: only the close of the transfer is awaited
    is_prefilled: bool = False  # the router has its first token, and relies on the transfer
    is_peer_gone: bool = False  # the transfer is closing by itself
    started_s: float | None = None
    received_s: float = 0.0
    is_probe: bool = False  # only its transfer is wanted, and how long that takes

    @property
    def peer(self) -> Peer:
        return self.prefill.receiver_addresses


class PromptCore:
    def __init__(self, limits: PromptLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.scheduler = PrefillScheduler(self.pool, limits.block_size, limits.max_num_batched_tokens)
        self.probe = PassProbe(self.pool, limits)
        self._jobs: dict[Owner, PromptJob] = {}
        self._peers: dict[str, Peer] = {}  # name of a COMPLETION worker → its process that we send to
        self._replaced: set[Peer] = set()  # earlier ones, until the last transfer to them has closed
        self._rate = PrefillRate()

    def on_router(self, message: Message, now: float) -> list[PromptCommand]:
        match message:
            case Prefill():
                return self._prefill(message, now)
            case TimePasses():
                return [ToRouter(failed) for failed in self.probe.begin(message, not self._jobs, now)]
            case TimeTransfer():
                return self._time_transfer(message, now)
            case Cancel():
                self.probe.stop(message.request_id)
                return self._give_up((message.request_id, message.attempt), "cancelled by the router")
            case Renew():
                return self._renew(message, now)
            case PeerGone():
                return self._peer_gone(message.worker)
            case _:
                return []

    def on_closed(self, closed: Closed, now: float) -> list[PromptCommand]:
        """The transfer of `closed.key` ended; nothing reads its blocks any more.

        A failure is the router's to know also when it has the first token: without the KV no second one comes.
        """
        job = self._jobs.pop(closed.key)
        self.scheduler.remove(closed.key)
        self.pool.release(closed.key)
        if job.is_probe and closed.outcome == "acked" and job.started_s is not None:
            return [ToRouter(TransferTimed(probe_id=closed.key[0], transfer_s=now - job.started_s))]
        is_expected = job.is_over and not job.is_probe and not job.is_prefilled
        return [] if is_expected or closed.outcome == "acked" else [self._failed(closed.key, closed.reason)]

    def reset(self, request_ids: Collection[str]) -> list[PromptCommand]:
        """Drop these requests and probes: the router that asked for them is gone."""
        for request_id in request_ids:
            self.probe.stop(request_id)
        keys = [key for key in self._jobs if key[0] in request_ids]
        return [command for key in keys for command in self._give_up(key, "the router is gone")]

    def tick(self, now: float) -> list[PromptCommand]:
        """Give up the prompts that the router did not renew or that come too late. Call it before every step."""
        commands: list[PromptCommand] = []
        for key in [key for key, job in self._jobs.items() if not job.is_over and now >= job.deadline_s]:
            late = Failed(request_id=key[0], attempt=key[1], reason=TOO_LATE, is_retryable=False, is_expired=True)
            commands += [ToRouter(late), *self._give_up(key, TOO_LATE)]
        expired = [key for key, job in self._jobs.items() if not job.is_over and now >= job.expires_at]
        reason = "the router did not renew its lease"
        commands += [self._failed(key, reason) for key in expired]
        commands += [ToRouter(ended) for ended in self.probe.tick(not self._jobs, now)]
        commands += self._forget_replaced()
        return commands + [command for key in expired for command in self._give_up(key, reason)]

    def schedule(self, now: float) -> tuple[list[ScheduledRow], list[PromptCommand]]:
        """Return the next step's rows, and the transfers to open before it runs."""
        rows = self.scheduler.schedule()
        commands: list[PromptCommand] = []
        for row in rows:
            job = self._jobs[row.sequence.key]
            if job.started_s is None:
                job.started_s, job.is_open = now, True
                commands.append(OpenTransfer(row.sequence.key, job.prefill, list(row.sequence.block_table)))
        return rows, commands

    def transfer_began(self, key: Owner, now: float) -> None:
        self._jobs[key].started_s = now

    def completed(
        self,
        rows: list[ScheduledRow],
        output: StepOutput,
        num_arrived_bytes: Callable[[Owner], int],
        now: float,
    ) -> list[PromptCommand]:
        """Account for a step. `num_arrived_bytes` tells how much of a transfer the receiver has confirmed."""
        self.scheduler.completed(rows)
        commands: list[PromptCommand] = []
        for row, token, scores in zip(rows, output.sampled, output.scores, strict=True):
            commands += _report_scores(row, scores)
            if token is not None:
                job = self._jobs[row.sequence.key]
                commands += self._first_token(job, token, num_arrived_bytes(row.sequence.key), now)
        return commands

    def measured(self, num_tokens: int, step_s: float) -> None:
        """Learn the prefill rate from a step."""
        self._rate.observe(num_tokens, step_s)

    def failed(self, rows: list[ScheduledRow], reason: str, is_retryable: bool = True) -> list[PromptCommand]:
        """The step raised, or could not sample these: their requests fail, the worker lives."""
        commands: list[PromptCommand] = []
        for row in rows:
            commands.append(self._failed(row.sequence.key, reason, is_retryable))
            commands += self._give_up(row.sequence.key, reason)
        return commands

    def peer_of(self, key: Owner) -> Peer:
        return self._jobs[key].peer

    def request_ids(self) -> set[str]:
        """Return the requests and probes that something is held for."""
        return {request_id for request_id, _ in (*self._jobs, *self.probe.owners())}

    def deadline(self) -> float | None:
        jobs = [job for job in self._jobs.values() if not job.is_over]
        return min((min(job.expires_at, job.deadline_s) for job in jobs), default=None)

    def load(self) -> Load:
        return Load(
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_queued_tokens=self.scheduler.num_queued_tokens,
            num_sequences=len(self.scheduler),
            num_transfers=sum(job.is_open for job in self._jobs.values()),
        )

    def check(self) -> None:
        """Assert I1, and that every block belongs to a prompt that is known here."""
        self.pool.check()
        known = {*self._jobs, *self.probe.owners()}
        assert set(self.pool.owners()) <= known, "blocks of a prompt that nobody knows"

    def _prefill(self, message: Prefill, now: float) -> list[PromptCommand]:
        key = (message.request_id, message.attempt)
        if key in self._jobs:
            return []  # delivered twice
        problem = self._problem(message)
        if problem is not None:
            failed = Failed(request_id=key[0], attempt=key[1], reason=problem, is_retryable=False, is_too_long=True)
            return [ToRouter(failed)]
        num_prompt_tokens = len(message.token_ids) - message.num_output_tokens
        sequence = Sequence(*key, list(message.token_ids), num_prompt_tokens, message.sampling)
        deadline_s = math.inf if message.remaining_ms is None else now + message.remaining_ms / 1000
        self._jobs[key] = PromptJob(message, sequence, now + self.limits.lease_s, deadline_s, received_s=now)
        self.scheduler.add(sequence, now, self._rate.tokens_per_s)
        return self._sends_to(message)

    def _time_transfer(self, message: TimeTransfer, now: float) -> list[PromptCommand]:
        """Make a job of which only the transfer is left, as if its prompt had been computed."""
        key = (message.probe_id, PROBE_ATTEMPT)
        if key in self._jobs:
            return []  # delivered twice
        num_blocks = blocks_for(message.num_tokens, self.limits.block_size)
        if num_blocks > self.pool.num_blocks:
            reason = f"{message.num_tokens} tokens take {num_blocks} KV blocks; the worker has {self.pool.num_blocks}"
            return [ToRouter(Failed(request_id=key[0], attempt=key[1], reason=reason, is_retryable=False))]
        is_idle = not self._jobs and not self.probe.is_active
        holding = self.pool.allocate(key, num_blocks, "sequence") if is_idle else None
        if holding is None:
            return [self._failed(key, "the worker is not idle")]
        prefill = _as_prefill(message)
        sequence = Sequence(*key, [], 0, PROBE_SAMPLING, block_table=holding.blocks)
        self._jobs[key] = PromptJob(prefill, sequence, now, is_open=True, is_over=True, received_s=now, is_probe=True)
        stages = PrefillStages(queue_s=0, prefill_s=0, num_computed_tokens=0, num_kv_bytes=0, num_kv_bytes_arrived=0)
        output = FirstOutput(0, SampledToken(token=0), stages)
        transfer = TimeKV(key, prefill, holding.blocks, message.num_tokens, output)
        return [*self._sends_to(prefill), transfer]

    def _sends_to(self, prefill: Prefill) -> list[PromptCommand]:
        """A worker's new process replaces the old one, even when a router that died could not say PeerGone."""
        name = _name_of(prefill.receiver)
        known = self._peers.get(name)
        self._peers[name] = prefill.receiver_addresses
        if known not in (None, prefill.receiver_addresses):
            self._replaced.add(known)
        self._replaced.discard(prefill.receiver_addresses)
        return self._forget_replaced()

    def _forget_replaced(self) -> list[PromptCommand]:
        """Close what nothing is sent over any more. What still is, belongs to a router that has yet to notice."""
        unused = self._replaced - {job.peer for job in self._jobs.values()}
        self._replaced -= unused
        return [ForgetPeer(peer) for peer in sorted(unused)]

    def _problem(self, message: Prefill) -> str | None:
        length = len(message.token_ids)
        if not message.num_output_tokens < length <= self.limits.max_model_len:
            return f"a prompt of {length} tokens; allowed are 1 to {self.limits.max_model_len}"
        if blocks_for(length, self.limits.block_size) > self.pool.num_blocks:
            return f"a prompt of {length} tokens does not fit into {self.pool.num_blocks} blocks"
        return None

    def _first_token(self, job: PromptJob, token: SampledToken, num_arrived: int, now: float) -> list[PromptCommand]:
        message, sequence = job.prefill, job.sequence
        assert job.started_s is not None
        stages = PrefillStages(
            queue_s=job.started_s - job.received_s,
            prefill_s=now - job.started_s,
            num_computed_tokens=len(sequence.token_ids),
            num_kv_bytes=self._num_kv_bytes(message),
            num_kv_bytes_arrived=num_arrived,
        )
        position = message.num_output_tokens
        reason = finish_reason(token.token, position + 1, message.sampling)
        report = FirstToken(
            request_id=message.request_id,
            attempt=message.attempt,
            position=position,
            token=token,
            finish_reason=reason,
            stages=stages,
        )
        job.is_over = True
        if reason is not None:
            return [ToRouter(report), AbortTransfer(sequence.key, job.peer, "the request is finished", True)]
        job.is_prefilled = True
        output = FirstOutput(position, token, stages)
        return [ToRouter(report), FinishTransfer(sequence.key, job.peer, output)]

    def _num_kv_bytes(self, message: Prefill) -> int:
        """Return how much this transfer has to move."""
        arrived = message.arrived_tokens or (message.num_cached_tokens,)
        num_there = sum(arrived) / len(arrived)
        return round(self.limits.kv_bytes_per_token * (len(message.token_ids) - num_there))

    def _renew(self, message: Renew, now: float) -> list[PromptCommand]:
        wanted = (*message.requests, *message.prefilled)
        for key in wanted:
            if key in self._jobs:
                self._jobs[key].expires_at = now + self.limits.lease_s
        missing = tuple(key for key in wanted if key not in self._jobs)
        return [ToRouter(Unknown(requests=missing))] if missing else []

    def _peer_gone(self, receiver: str) -> list[PromptCommand]:
        """One router lost sight of this worker. Others may still see it: their transfers keep the connection."""
        jobs = {key: job for key, job in self._jobs.items() if not job.is_peer_gone}
        lost = {key: job for key, job in jobs.items() if job.prefill.receiver == receiver}
        known = {peer for name, peer in self._peers.items() if name == _name_of(receiver)}
        in_use = {job.peer for key, job in jobs.items() if key not in lost}
        peers = ({job.peer for job in lost.values()} or known) - in_use
        commands: list[PromptCommand] = []
        for key, job in lost.items():
            job.is_peer_gone = job.peer in peers
            commands += self._give_up(key, "the COMPLETION worker is gone")
        self._replaced -= peers
        return [*commands, *(ForgetPeer(peer) for peer in sorted(peers))]

    def _give_up(self, key: Owner, reason: str) -> list[PromptCommand]:
        """Stop computing `key`; its blocks come home when its transfer has closed. An unknown key is fine."""
        job = self._jobs.get(key)
        if job is None:
            return []
        job.is_over, job.is_prefilled = True, False
        self.scheduler.remove(key)
        if job.is_peer_gone:
            if not job.is_open:
                del self._jobs[key]
            return []
        # A prompt that has not begun tells its receiver as well: it reuses the granted blocks only on our word.
        opening = [] if job.is_open else [OpenTransfer(key, job.prefill, [])]
        job.is_open = True
        return [*opening, AbortTransfer(key, job.peer, reason)]

    def _failed(self, key: Owner, reason: str, is_retryable: bool = True) -> ToRouter:
        failed = Failed(request_id=key[0], attempt=key[1], reason=reason[:1024], is_retryable=is_retryable)
        return ToRouter(failed)


def _name_of(worker: str) -> str:
    return worker.partition("/")[0]


def _report_scores(row: ScheduledRow, scores: AnySequence[SampledToken]) -> list[PromptCommand]:
    request_id, attempt = row.sequence.key
    size = MAX_SCORES_PER_MESSAGE
    return [
        ToRouter(
            PromptScores(
                request_id=request_id,
                attempt=attempt,
                position=row.scored.start + i,
                tokens=tuple(scores[i : i + size]),
            )
        )
        for i in range(0, len(scores), size)
    ]


def _as_prefill(message: TimeTransfer) -> Prefill:
    """Return what a request with such a transfer would have said."""
    return Prefill(
        request_id=message.probe_id,
        attempt=PROBE_ATTEMPT,
        sampling=PROBE_SAMPLING,
        generation=message.generation,
        credit_bytes=message.credit_bytes,
        receiver=message.receiver,
        receiver_addresses=message.receiver_addresses,
    )
