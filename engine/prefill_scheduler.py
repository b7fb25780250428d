"""Which prompt chunks the next step of a PROMPT worker runs. Pure.

The order is arrival time plus predicted prefill time: a short prompt overtakes a long one that came at the same moment,
but nothing waits for ever, because every newcomer's key is later. A prompt gets all its blocks before its first chunk.
"""

from dataclasses import dataclass

from .block_pool import BlockPool, Owner, blocks_for
from .sequence import ScheduledRow, Sequence

MAX_SCORED_TOKENS = 256  # a step: each token's logits, a float32 for every word of the vocabulary, are kept


@dataclass
class PrefillRate:
    """How fast a PROMPT worker computes, learned from what it did."""

    tokens_per_s: float = 1000.0  # prior, until something was observed

    def observe(self, num_tokens: int, duration_s: float) -> None:
        if duration_s > 0 and num_tokens >= 16:
            self.tokens_per_s += 0.3 * (num_tokens / duration_s - self.tokens_per_s)


@dataclass
class QueuedPrompt:
    sequence: Sequence
    order_s: float  # arrival + predicted prefill time
    arrived_s: float


class PrefillScheduler:
    def __init__(self, pool: BlockPool, block_size: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._budget = max_num_batched_tokens
        self._prompts: dict[Owner, QueuedPrompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return sum(len(p.sequence.token_ids) - p.sequence.num_computed_tokens for p in self._prompts.values())

    def get(self, key: Owner) -> QueuedPrompt | None:
        return self._prompts.get(key)

    def keys(self) -> list[Owner]:
        return list(self._prompts)

    def add(self, sequence: Sequence, now: float, tokens_per_s: float) -> None:
        predicted_s = len(sequence.token_ids) / tokens_per_s
        self._prompts[sequence.key] = QueuedPrompt(sequence, now + predicted_s, now)

    def remove(self, key: Owner) -> None:
        """Forget a prompt; its blocks are the caller's to release. An unknown key is fine."""
        self._prompts.pop(key, None)

    def schedule(self, max_num_tokens: int | None = None) -> list[ScheduledRow]:
        """Return the next step's chunks, at most the token budget or `max_num_tokens`; only a last chunk samples.

        Of prompts that are scored at most MAX_SCORED_TOKENS run in one step, together.
        """
        rows: list[ScheduledRow] = []
        left, is_short_of_blocks = self._budget if max_num_tokens is None else max_num_tokens, False
        left_scored = MAX_SCORED_TOKENS
        for prompt in sorted(self._prompts.values(), key=lambda p: p.order_s):
            sequence = prompt.sequence
            if left == 0:
                break
            is_scored = sequence.sampling.scores_prompt
            if is_scored and left_scored == 0:
                continue
            if not sequence.block_table and (is_short_of_blocks or not self._take_blocks(sequence)):
                is_short_of_blocks = True  # nobody takes blocks before it, but those that have theirs go on
                continue
            start, length = sequence.num_computed_tokens, len(sequence.token_ids)
            end = min(length, start + (min(left, left_scored) if is_scored else left))
            rows.append(ScheduledRow(sequence, start, end, samples=end == length))
            left -= end - start
            left_scored -= end - start if is_scored else 0
        return rows

    def completed(self, rows: list[ScheduledRow]) -> None:
        """Account for a step; prompts whose last chunk ran leave the queue."""
        for row in rows:
            row.sequence.num_computed_tokens = row.end
            if row.samples:
                self.remove(row.sequence.key)

    def _take_blocks(self, sequence: Sequence) -> bool:
        num_blocks = blocks_for(len(sequence.token_ids), self._block_size)
        holding = self._pool.allocate(sequence.key, num_blocks, "sequence")
        if holding is None:
            return False
        sequence.block_table = holding.blocks
        return True
