"""The simulated cluster: the router's own placement, the workers, and the links between them.

A request waits at the router until a pair has room (strictly in order), is granted its blocks, prefilled, sent, and
decoded; a preempted one goes back to its old place in the queue and is prefilled again with its outputs so far.
Worker failures, time-outs and the control messages' time are not simulated: `request_overhead_s` stands for the latter.
"""

from functools import partial

from ...engine.sequence import ScheduledRow
from ...router.fair_queue import Ticket
from ...router.placement import Placement
from ..protocol.identity import WorkerId
from .clock import ARRIVAL, DELIVERY
from .decoding import CompletionWorker
from .prefilling import PromptWorker
from .result import Policy
from .transfers import Links, Parcel
from .world import Job, Limits, Mixing, World

MAX_SLOWDOWN = 1.1  # under `auto`: what a prompt may cost the sequences that decode beside it, in step times


class System:
    def __init__(self, world: World, policy: Policy) -> None:
        self._world = world
        self._policy: Policy = policy
        self._placement = Placement()
        self._links = Links(world)
        self._prompts: dict[str, PromptWorker] = {}
        self._completions: dict[str, CompletionWorker] = {}
        self._ids: dict[str, WorkerId] = {}

    def add_prompt_workers(self, num_workers: int, limits: Limits) -> None:
        for name in self._names("prompt", num_workers):
            self._placement.add_prompt(self._ids[name], limits.max_num_batched_tokens)
            self._prompts[name] = PromptWorker(name, self._world, limits, self._pass_ended)
            self._world.host.prompt_workers.append(self._prompts[name])

    def add_completion_workers(self, kind: str, num_workers: int, limits: Limits, mixing: Mixing) -> None:
        for name in self._names(kind, num_workers):
            self._placement.add_completion(self._ids[name], limits.num_blocks, limits.block_size, limits.max_num_seqs)
            self._completions[name] = CompletionWorker(name, self._world, limits, mixing, self)
            self._world.host.completion_workers.append(self._completions[name])

    def expect(self, job: Job) -> None:
        """Let a request arrive in its time."""
        arrived_s = job.request.arrival_s + self._world.cost.request_overhead_s
        self._world.clock.at(arrived_s, ARRIVAL, lambda: self._enqueue([job]))

    def ended(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.outcome.is_finished = True
            self._placement.forget(job.request.request_id, self._world.clock.now)
        self._dispatch()

    def handed_back(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.outcome.num_preemptions += 1
        self._enqueue(jobs)

    def check_at_rest(self) -> None:
        """Assert that nothing is held for anyone any more."""
        for worker in (*self._prompts.values(), *self._completions.values()):
            worker.pool.check()
            assert worker.pool.num_free == worker.pool.num_blocks, f"{worker.name} still holds blocks"
        assert not self._placement.charged() and not self._placement.num_queued, "requests are left over"

    def refusal(self, num_tokens: int) -> str | None:
        """Return why no worker could ever hold a sequence of `num_tokens` and its next token, or None."""
        completion = next(iter(self._completions.values()))
        reason = completion.limits.refusal(num_tokens + 1)
        prompt = next(iter(self._prompts.values()), None)
        return reason or (prompt.limits.refusal(num_tokens) if prompt is not None else None)

    def _names(self, kind: str, num_workers: int) -> list[str]:
        names = [f"{kind}-{i}" for i in range(num_workers)]
        self._ids |= {name: WorkerId(name, "simulated") for name in names}
        return names

    def _enqueue(self, jobs: list[Job]) -> None:
        now = self._world.clock.now
        for job in jobs:
            job.outcome.refused = self.refusal(job.num_tokens)
            if job.outcome.refused is None:
                self._placement.enqueue(Ticket(job.arrival_order, job.request.request_id, job.num_tokens), now)
            else:
                self._placement.forget(job.request.request_id, now)
        self._dispatch()

    def _dispatch(self) -> None:
        while (request_id := self._placement.next()) is not None:
            for name, worker in self._completions.items():
                self._placement.note_free_blocks(self._ids[name], worker.num_free_blocks)
            job = self._world.jobs[request_id]
            is_alone = self._is_better_alone(job)
            now = self._world.clock.now
            if is_alone:
                prompt, completion = None, self._placement.place_next_alone(job.num_tokens, now)
            else:
                prompt, completion = self._placement.place_next(job.num_tokens, now) or (None, None)
            if completion is None:
                break
            self._start(job, prompt, completion)

    def _start(self, job: Job, prompt: WorkerId | None, completion: WorkerId) -> None:
        """The next request was placed: its blocks are granted at once, and its prefill is queued."""
        job.attempt += 1
        job.started_s = None
        worker = self._completions[completion.name]
        worker.grant(job)
        self._placement.granted(job.request.request_id, completion)
        job.completion_worker = completion.name
        if prompt is None:
            worker.prefill(job)
        else:
            job.prompt_worker = prompt.name
            self._prompts[prompt.name].add(job)

    def _pass_ended(self, worker: PromptWorker, rows: list[ScheduledRow]) -> None:
        parcels: list[Parcel] = []
        ended: list[Job] = []
        for row in rows:
            if row.samples:
                job = self._world.jobs[row.sequence.request_id]
                self._prefilled(job, len(row.sequence.token_ids))
                if job.num_left:
                    parcels.append(Parcel(job, row.end, row.end - row.start))
                else:
                    self._completions[job.completion_worker].release(job)
                    worker.release(job)
                    ended.append(job)
        for arrival_s, jobs in self._links.send(parcels):
            self._world.clock.at(arrival_s, DELIVERY, partial(self._delivered, worker, jobs))
        self.ended(ended)

    def _prefilled(self, job: Job, num_tokens: int) -> None:
        now = self._world.clock.now
        job.end_prefill(now)
        if self._world.rules.first_token == "prefill":
            self._world.ledger.token(job.outcome, now)
        view = self._placement.prefilled(job.request.request_id, self._ids[job.prompt_worker], now)
        assert view is not None and job.started_s is not None
        view.observe(num_tokens, now - job.started_s)

    def _delivered(self, worker: PromptWorker, jobs: list[Job]) -> None:
        for job in jobs:
            worker.release(job)
        self._completions[jobs[0].completion_worker].join(jobs)

    def _is_better_alone(self, job: Job) -> bool:
        """Under `auto`: is the request's first token sooner when its COMPLETION worker prefills it between decodes?

        It is when the wait for a PROMPT worker, the prefill there (and the transfer, where the first token needs it)
        are predicted to take longer than the chunks here. No pass may take more than MAX_SLOWDOWN decode steps, so only
        prompts or chunks about as small as C* ride along, unless nobody decodes. Output lengths play no part.
        """
        if self._policy != "auto":
            return not self._prompts
        num_tokens, cost = job.num_tokens, self._world.cost
        worker = self._placement.completion_for(num_tokens, self._world.clock.now)
        if worker is None:
            return False
        here_s, slowdown = self._completions[worker.name].predicted_prefill_s(num_tokens)
        wait_s = min(prompt.predicted_wait_s() for prompt in self._prompts.values())
        there_s = wait_s + cost.sent_pass_s([(0, num_tokens)])
        if self._world.rules.first_token == "decode":
            there_s += cost.transfer_s(num_tokens)
        return slowdown <= MAX_SLOWDOWN and here_s < there_s
