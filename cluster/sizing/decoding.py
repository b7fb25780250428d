"""A simulated COMPLETION or NORMAL worker: the system's own schedulers and block pool, asked at changes.

Between two changes (a sequence joins or ends, a prompt waits, blocks run out, the host gets busy) all steps are alike
or grow evenly, so a run of them is one event; a change in the middle ends the run at the step's boundary. A NORMAL
worker, and a COMPLETION worker under `auto`, also prefills: prompts go first and alone, or in chunks beside decodes.
"""

from math import inf
from typing import Protocol

from ...engine.block_pool import BlockPool, blocks_for
from ...engine.decode_scheduler import DecodeScheduler
from ...engine.sequence import ScheduledRow, Sequence
from .clock import PASS_END, instant
from .prefilling import new_sequence, prompt_queue
from .result import Bar, BarKind
from .steps import BlockNeed, Steps
from .world import Job, Limits, Mixing, World


class Router(Protocol):
    def ended(self, jobs: list[Job]) -> None:
        """These requests have all their tokens."""
        ...

    def handed_back(self, jobs: list[Job]) -> None:
        """These lost their blocks: they are prefilled again, wherever there is room."""
        ...


class CompletionWorker:
    def __init__(self, name: str, world: World, limits: Limits, mixing: Mixing, router: Router) -> None:
        self.name = name
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self._world = world
        self._mixing = mixing
        self._router = router
        self._scheduler = DecodeScheduler(self.pool, limits.block_size, limits.max_num_batched_tokens)
        self._prompts = prompt_queue(world, self.pool, limits)
        self._sequences: dict[tuple[str, int], Sequence] = {}  # granted, waiting for its KV or its prefill
        self._steps: Steps | None = None
        self._num_ends = 0  # an end that was scheduled before the latest is void
        self._is_busy = False

    @property
    def num_free_blocks(self) -> int:
        """What the worker reports: free of everything that the step which runs has taken."""
        return self.pool.num_free - self._num_taken()

    def grant(self, job: Job) -> None:
        """Reserve the job's blocks. The router's view of the room is this worker's own, so there is room."""
        num_blocks = blocks_for(job.num_tokens + 1, self.limits.block_size)
        assert self._scheduler.has_headroom(num_blocks + self._num_taken()), "granted without headroom"
        holding = self.pool.allocate(job.key, num_blocks, "granted")
        assert holding is not None, "granted more blocks than are free"
        self._sequences[job.key] = new_sequence(job, holding.blocks)
        steps = self._steps
        if steps is not None and steps.blocks is not None:
            self._shorten(steps, steps.blocks.most_steps(self.pool.num_free, steps.num_steps))

    def release(self, job: Job) -> None:
        """A grant is not needed."""
        del self._sequences[job.key]
        self.pool.release(job.key)

    def prefill(self, job: Job) -> None:
        """Prefill a granted job here."""
        self._prompts.add(self._sequences[job.key], self._world.clock.now, inf)
        self._interrupt()

    def join(self, jobs: list[Job]) -> None:
        """The KV of these granted jobs is here: decode them from the next step on."""
        for job in jobs:
            self._start_decoding(job)
        self._interrupt()

    def disturbed(self) -> None:
        if self._steps is not None and not self._steps.chunks:
            self._shorten(self._steps, self._steps.step_at(self._world.clock.now))

    def predicted_prefill_s(self, num_tokens: int) -> tuple[float, float]:
        """Return how long a prompt would take to prefill here in chunks, and how much longer a pass would be for it."""
        cost, running = self._world.cost, self._steps.decodes if self._steps else []
        cached = sum(sequence.num_computed_tokens for sequence in running)
        step_s = cost.decode_s(len(running), cached) if running else 0.0
        waiting = self._prompts.num_queued_tokens + num_tokens
        chunk = min(waiting, self._mixing.chunk_tokens(cost, len(running), cached) or waiting)
        pass_s = cost.fused_s([(0, chunk)], len(running), cached)
        return step_s / 2 + -(-waiting // chunk) * pass_s, pass_s / step_s if step_s else 1.0

    def _num_taken(self) -> int:
        """Blocks that the present run has taken by now; the pool learns it when the run ends."""
        steps = self._steps
        if steps is None or steps.blocks is None:
            return 0
        return steps.blocks.by_step(steps.step_at(self._world.clock.now))

    def _interrupt(self) -> None:
        """What the next step runs has changed."""
        if self._steps is None:
            self._begin()
        elif not self._steps.chunks:
            self._shorten(self._steps, self._steps.step_at(self._world.clock.now))

    def _shorten(self, steps: Steps, num_steps: int) -> None:
        if num_steps < steps.num_steps:
            steps.num_steps = num_steps
            self._schedule_end(steps)

    def _begin(self) -> None:
        """Start what comes next, if there is anything."""
        chunks, decodes, preempted = self._schedule()
        self._steps = self._priced(chunks, decodes) if chunks or decodes else None
        if self._steps is not None:
            self._schedule_end(self._steps)
        if self._is_busy != (self._steps is not None):
            self._is_busy = not self._is_busy
            self._world.host.decoding_changed(self._is_busy)
        if preempted:
            self._router.handed_back([self._world.jobs[sequence.request_id] for sequence in preempted])

    def _schedule(self) -> tuple[list[ScheduledRow], list[ScheduledRow], list[Sequence]]:
        """Return the next step's prompt chunks and decode rows, and the sequences that gave up their blocks."""
        if len(self._prompts) and not self._mixing.in_chunks:
            return self._prompts.schedule(), [], []
        decodes, preempted = self._scheduler.schedule() if len(self._scheduler) else ([], [])
        if not len(self._prompts):
            return [], decodes, preempted
        cached = sum(row.start for row in decodes)
        left = self.limits.max_num_batched_tokens - len(decodes)
        chunk = self._mixing.chunk_tokens(self._world.cost, len(decodes), cached)
        left = left if chunk is None else min(left, chunk)
        return self._prompts.schedule(left) if left > 0 else [], decodes, preempted

    def _priced(self, chunks: list[ScheduledRow], decodes: list[ScheduledRow]) -> Steps:
        cost, now, factor = self._world.cost, self._world.clock.now, self._world.host.decode_factor
        cached, sequences = sum(row.start for row in decodes), [row.sequence for row in decodes]
        if chunks:
            for row in chunks:
                self._begin_prefill(row)
            pass_s = cost.fused_s([(row.start, row.end - row.start) for row in chunks], len(decodes), cached)
            return Steps(now, pass_s * factor, 0.0, 1, chunks, sequences)
        num, jobs = len(decodes), self._world.jobs
        growth_s = cost.decode_s(num, num) - cost.decode_s(num, 0)
        steps = Steps(now, cost.decode_s(num, cached) * factor, growth_s * factor, 1, [], sequences)
        if num == len(self._scheduler):  # else they take turns
            steps.num_steps = min([jobs[sequence.request_id].num_left for sequence in sequences])
        if self.limits.has_few_blocks:
            steps.blocks = BlockNeed.of(sequences, self.limits.block_size)
            steps.num_steps = steps.blocks.most_steps(self.pool.num_free, steps.num_steps)
        return steps

    def _begin_prefill(self, row: ScheduledRow) -> None:
        job = self._world.jobs[row.sequence.request_id]
        if job.started_s is None:
            job.begin_prefill(self._world.clock.now)

    def _schedule_end(self, steps: Steps) -> None:
        self._num_ends += 1
        number = self._num_ends
        end_s = steps.end_s(steps.num_steps)
        self._world.clock.at(end_s, PASS_END, lambda: self._end(steps) if number == self._num_ends else None)

    def _end(self, steps: Steps) -> None:
        self._steps = None
        self._account(steps)
        ended = self._advance(steps) + self._end_chunks(steps.chunks)
        self._begin()
        if ended:
            self._router.ended(ended)

    def _advance(self, steps: Steps) -> list[Job]:
        """Give every decoding sequence its tokens; return those that have all of them."""
        num_steps, now, ledger = steps.num_steps, self._world.clock.now, self._world.ledger
        first_s, longest_s, tokens = instant(steps.end_s(1)), steps.step_s(num_steps), [0] * num_steps
        ended: list[Job] = []
        num_steady = 0  # sequences whose first gap of this run is its first step
        for sequence in steps.decodes:
            job = self._world.jobs[sequence.request_id]
            outcome = job.outcome
            is_steady = outcome.last_token_s == steps.start_s
            if is_steady:
                num_steady += 1
            else:
                ledger.token(outcome, first_s)
            if (is_steady or num_steps > 1) and longest_s > outcome.max_gap_s:
                outcome.max_gap_s = longest_s
            outcome.num_tokens += num_steps if is_steady else num_steps - 1
            outcome.last_token_s = now
            sequence.token_ids += tokens
            sequence.num_computed_tokens += num_steps
            if job.num_left == 0:
                ended.append(job)
                self._forget(job)
        ledger.growing_gaps(steps.first_s, 0.0, 1, num_steady)
        if num_steps > 1:
            ledger.growing_gaps(steps.step_s(2), steps.growth_s, num_steps - 1, len(steps.decodes))
        return ended

    def _end_chunks(self, chunks: list[ScheduledRow]) -> list[Job]:
        """Prompts whose last chunk ran decode from the next step on; return those that have all their tokens."""
        if chunks:
            self._prompts.completed(chunks)
        ended: list[Job] = []
        for job in [self._world.jobs[row.sequence.request_id] for row in chunks if row.samples]:
            job.end_prefill(self._world.clock.now)
            if self._world.rules.first_token == "prefill":
                self._world.ledger.token(job.outcome, self._world.clock.now)
            if job.num_left == 0:
                self.release(job)
                ended.append(job)
            else:
                self._start_decoding(job)
        return ended

    def _start_decoding(self, job: Job) -> None:
        job.arrive(self._world.clock.now)
        sequence = self._sequences.pop(job.key)
        sequence.num_computed_tokens = len(sequence.token_ids)
        sequence.token_ids.append(0)
        self.pool.promote(job.key)
        self._scheduler.add(sequence)

    def _forget(self, job: Job) -> None:
        self._scheduler.remove(job.key)
        self.pool.release(job.key)

    def _account(self, steps: Steps) -> None:
        kind: BarKind = "decode" if not steps.chunks else "fused" if steps.decodes else "prefill"
        ids: tuple[str, ...] = ()
        if self._world.ledger.keep_bars:
            ids = (*(row.sequence.request_id for row in steps.chunks), *(s.request_id for s in steps.decodes))
        num_prefill_tokens = sum([row.end - row.start for row in steps.chunks])
        num_decode_tokens = steps.num_steps * len(steps.decodes)
        now = self._world.clock.now
        bar = Bar(self.name, kind, steps.start_s, now, steps.num_steps, num_prefill_tokens, num_decode_tokens, ids)
        self._world.ledger.occupy(bar)
