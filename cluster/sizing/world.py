"""What the parts of a simulation share: the cost model, the rules, the clock, the ledger, and every request's state."""

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from math import inf
from sys import maxsize
from typing import Literal

from ...engine.block_pool import blocks_for
from ..costs import Capacity, CostModel
from .clock import Clock
from .contention import Host
from .ledger import Ledger
from .result import Outcome
from .units import counted
from .workload import Request


@dataclass(frozen=True)
class Rules:
    """What engines do differently. The defaults are those of this system; `TEXTBOOK` are the literature's."""

    first_token: Literal["prefill", "decode"] = "prefill"  # at the prefill's end, or at the next decode step's
    transfer: Literal["streamed", "after"] = "streamed"  # layer by layer during the prefill, or as a whole after it
    packs_prompts: bool = True  # several prompts share a pass, up to the token budget; False: one prompt, FIFO
    colocated: bool = False  # all workers share one host: the cost model's contention applies


TEXTBOOK = Rules(first_token="decode", transfer="after", packs_prompts=False)
LEAST_CHUNK_TOKENS = 16


@dataclass(frozen=True)
class Mixing:
    """How a worker that prefills as well mixes both. `chunk` None: C* at the running batch."""

    in_chunks: bool
    chunk: int | None = None

    def chunk_tokens(self, cost: CostModel, num_sequences: int, num_cached_tokens: float) -> int | None:
        """Return the prompt tokens of the next pass; None: up to the token budget."""
        if not self.in_chunks:
            return None
        if self.chunk is not None:
            return self.chunk
        tokens = cost.chunk_size(max(1, num_sequences), num_cached_tokens)
        return None if tokens == inf else max(LEAST_CHUNK_TOKENS, int(tokens))


@dataclass(slots=True)
class Job:
    """A request on its way, and what its present attempt is."""

    request: Request
    outcome: Outcome
    arrival_order: int
    attempt: int = 0
    prompt_worker: str = ""
    completion_worker: str = ""
    started_s: float | None = None  # the first pass over it

    @property
    def key(self) -> tuple[str, int]:
        return (self.request.request_id, self.attempt)

    @property
    def num_tokens(self) -> int:
        """What an attempt that starts now has to prefill."""
        return self.request.num_prompt_tokens + self.outcome.num_tokens

    @property
    def num_left(self) -> int:
        return self.request.num_output_tokens - self.outcome.num_tokens

    def begin_prefill(self, now: float) -> None:
        self.started_s = now
        if self.outcome.prefill_start_s is None:
            self.outcome.prefill_start_s = now

    def end_prefill(self, now: float) -> None:
        if self.outcome.prefill_end_s is None:
            self.outcome.prefill_end_s = now

    def arrive(self, now: float) -> None:
        """The KV is where the sequence decodes."""
        if self.outcome.transfer_end_s is None:
            self.outcome.transfer_end_s = now


@dataclass(frozen=True)
class Limits:
    """A worker's capacity in whole numbers. Without a limit on blocks, one block holds any sequence."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    has_few_blocks: bool

    @staticmethod
    def of(capacity: Capacity, requests: AnySequence[Request]) -> "Limits":
        seqs, batched = capacity.max_num_seqs or maxsize, capacity.max_num_batched_tokens or maxsize
        if capacity.num_blocks is not None:
            return Limits(capacity.num_blocks, capacity.block_size, seqs, batched, True)
        longest = max(request.num_prompt_tokens + request.num_output_tokens for request in requests)
        return Limits(2 * len(requests) + 1, longest + 1, seqs, batched, False)

    def refusal(self, num_tokens: int) -> str | None:
        """Return why a sequence of `num_tokens` can never be held, or None."""
        if blocks_for(num_tokens, self.block_size) <= self.num_blocks:
            return None
        return f"its tokens do not fit into {counted(self.num_blocks, 'block')} of {self.block_size}"


@dataclass
class World:
    cost: CostModel
    rules: Rules
    clock: Clock
    ledger: Ledger
    host: Host
    jobs: dict[str, Job]
