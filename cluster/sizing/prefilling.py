"""A simulated PROMPT worker: the system's own scheduler and block pool; only its passes are the cost model's."""

from collections.abc import Callable
from typing import Protocol

from ...engine.block_pool import BlockPool, Owner, blocks_for
from ...engine.prefill_scheduler import PrefillRate, PrefillScheduler
from ...engine.sequence import ScheduledRow, Sequence
from ..protocol.messages import SamplingParams
from .clock import PASS_END
from .result import Bar
from .world import Job, Limits, World

SAMPLING = SamplingParams()


class PromptQueue(Protocol):
    """What decides which chunks a pass runs: the system's PrefillScheduler, or the textbook's queue."""

    def __len__(self) -> int: ...
    @property
    def num_queued_tokens(self) -> int: ...
    def add(self, sequence: Sequence, now: float, tokens_per_s: float) -> None: ...
    def schedule(self, max_num_tokens: int | None = None) -> list[ScheduledRow]: ...
    def completed(self, rows: list[ScheduledRow]) -> None: ...


class FifoQueue:
    """One prompt a pass, in order of arrival."""

    def __init__(self, pool: BlockPool, block_size: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._budget = max_num_batched_tokens
        self._prompts: dict[Owner, Sequence] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_queued_tokens(self) -> int:
        return sum(len(s.token_ids) - s.num_computed_tokens for s in self._prompts.values())

    def add(self, sequence: Sequence, now: float, tokens_per_s: float) -> None:
        self._prompts[sequence.key] = sequence

    def schedule(self, max_num_tokens: int | None = None) -> list[ScheduledRow]:
        sequence = next(iter(self._prompts.values()), None)
        if sequence is None:
            return []
        if not sequence.block_table:
            num_blocks = blocks_for(len(sequence.token_ids), self._block_size)
            holding = self._pool.allocate(sequence.key, num_blocks, "sequence")
            if holding is None:
                return []
            sequence.block_table = holding.blocks
        start, length = sequence.num_computed_tokens, len(sequence.token_ids)
        end = min(length, start + (self._budget if max_num_tokens is None else max_num_tokens))
        return [ScheduledRow(sequence, start, end, samples=end == length)]

    def completed(self, rows: list[ScheduledRow]) -> None:
        for row in rows:
            row.sequence.num_computed_tokens = row.end
            if row.samples:
                del self._prompts[row.sequence.key]


def prompt_queue(world: World, pool: BlockPool, limits: Limits) -> PromptQueue:
    kind = PrefillScheduler if world.rules.packs_prompts else FifoQueue
    return kind(pool, limits.block_size, limits.max_num_batched_tokens)


def new_sequence(job: Job, block_table: list[int] | None = None) -> Sequence:
    """Return the state of the job's present attempt inside one worker."""
    length = job.num_tokens
    return Sequence(*job.key, [0] * length, length, SAMPLING, job.arrival_order, block_table=block_table or [])


PassEnded = Callable[["PromptWorker", list[ScheduledRow]], None]


class PromptWorker:
    """Runs passes while there are prompts. A pass goes on more slowly for as long as its host decodes meanwhile."""

    def __init__(self, name: str, world: World, limits: Limits, on_pass: PassEnded) -> None:
        self.name = name
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self._world = world
        self._on_pass = on_pass
        self._queue = prompt_queue(world, self.pool, limits)
        self._rate = PrefillRate()
        self._rows: list[ScheduledRow] = []
        self._start_s = self._left_s = self._since_s = 0.0  # of the pass that runs; what is left at full speed
        self._factor = 1.0
        self._num_ends = 0  # an end that was scheduled before the latest is void

    def predicted_wait_s(self) -> float:
        """Return when a prompt that came now would begin: after the pass that runs and all that is queued."""
        queued = self._queue.num_queued_tokens - sum(row.end - row.start for row in self._rows)
        running_s = self._left_s - (self._world.clock.now - self._since_s) / self._factor if self._rows else 0.0
        return max(0.0, running_s) + (self._world.cost.sent_pass_s([(0, queued)]) if queued else 0.0)

    def add(self, job: Job) -> None:
        self._queue.add(new_sequence(job), self._world.clock.now, self._rate.tokens_per_s)
        self.wake()

    def release(self, job: Job) -> None:
        """The job's KV is where it decodes, or not needed."""
        self.pool.release(job.key)
        self.wake()

    def wake(self) -> None:
        if not self._rows and self._begin():
            self._world.host.prefilling_changed(True)

    def disturbed(self) -> None:
        if not self._rows:
            return
        now = self._world.clock.now
        self._left_s -= (now - self._since_s) / self._factor
        self._since_s = now
        self._schedule_end()

    def _begin(self) -> bool:
        self._rows = self._queue.schedule() if len(self._queue) else []
        if not self._rows:
            return False
        self._start_s = self._since_s = self._world.clock.now
        self._left_s = self._world.cost.sent_pass_s([(row.start, row.end - row.start) for row in self._rows])
        for row in self._rows:
            job = self._world.jobs[row.sequence.request_id]
            if job.started_s is None:
                job.begin_prefill(self._start_s)
        self._schedule_end()
        return True

    def _schedule_end(self) -> None:
        self._factor = self._world.host.prefill_factor
        self._num_ends += 1
        number = self._num_ends
        end_s = self._since_s + max(0.0, self._left_s) * self._factor
        self._world.clock.at(end_s, PASS_END, lambda: self._end() if number == self._num_ends else None)

    def _end(self) -> None:
        rows, now, start_s = self._rows, self._world.clock.now, self._start_s
        num_tokens = sum(row.end - row.start for row in rows)
        ids = tuple(row.sequence.request_id for row in rows)
        self._world.ledger.occupy(Bar(self.name, "prefill", start_s, now, 1, num_tokens, 0, ids))
        self._queue.completed(rows)
        self._rate.observe(num_tokens, now - start_s)
        if not self._begin():
            self._world.host.prefilling_changed(False)
        self._on_pass(self, rows)
