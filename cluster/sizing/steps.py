"""A COMPLETION or NORMAL worker's present work in closed form: one pass, or a run of decode steps of one batch."""

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt

from ...engine.sequence import ScheduledRow, Sequence
from .clock import TICK_S


@dataclass(slots=True)
class Steps:
    """`num_steps` decode steps of the same sequences, each `growth_s` longer than the one before.

    With prompt chunks it is a single step, and without any decode row a prefill pass.
    """

    start_s: float
    first_s: float
    growth_s: float
    num_steps: int
    chunks: list[ScheduledRow]
    decodes: list[Sequence]
    blocks: "BlockNeed | None" = None  # None: there is no limit

    def end_s(self, step: int) -> float:
        return self.start_s + step * self.first_s + self.growth_s * (step * (step - 1) / 2)

    def step_s(self, step: int) -> float:
        return self.first_s + self.growth_s * (step - 1)

    def step_at(self, now: float) -> int:
        """Return which step runs, from 1: the first one that ends at `now` or later."""
        slope, half = self.first_s - self.growth_s / 2, self.growth_s / 2
        root = slope + sqrt(slope * slope + 4 * half * max(0.0, now - self.start_s))
        step = max(1, min(self.num_steps, int(2 * (now - self.start_s) / root) if root else self.num_steps))
        now -= TICK_S / 2  # ends are rounded to an instant
        while step < self.num_steps and self.end_s(step) < now:
            step += 1
        while step > 1 and self.end_s(step - 1) >= now:
            step -= 1
        return step


@dataclass(slots=True)
class BlockNeed:
    """How many blocks a batch takes beyond those it holds at its first step."""

    block_size: int
    num_sequences: int
    _num_full_before: list[int] = field(default_factory=list[int])  # by tokens: sequences with fewer free slots

    @staticmethod
    def of(sequences: AnySequence[Sequence], block_size: int) -> "BlockNeed":
        counts = [0] * block_size
        for sequence in sequences:
            counts[len(sequence.block_table) * block_size - len(sequence.token_ids)] += 1
        return BlockNeed(block_size, len(sequences), list(accumulate(counts, initial=0)))

    def by_step(self, step: int) -> int:
        """Return the number taken before `step` runs."""
        full_rounds, tokens = divmod(step - 1, self.block_size)
        return full_rounds * self.num_sequences + self._num_full_before[tokens]

    def most_steps(self, num_blocks: int, at_most: int) -> int:
        """Return how many steps run, of `at_most`, before more than `num_blocks` are needed."""
        if self.by_step(at_most) <= num_blocks:
            return at_most
        low, high = 1, at_most  # low is possible, high is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.by_step(middle) <= num_blocks else (low, middle)
        return low
