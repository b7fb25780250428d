"""Who owns each KV block. Pure: ids only, no tensors.

Every block has exactly one owner (I1). An allocation gets a generation that no other allocation ever had, so that a
byte sent under an old one can be told apart (I2). Low ids go first: neighbours stay neighbours, copies stay long.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Owner = tuple[str, int]  # (request_id, attempt)
Use = Literal["granted", "sequence"]


@dataclass
class Holding:
    """What one owner holds. `granted`: promised to a transfer; `sequence`: in use by a scheduler."""

    generation: int
    use: Use
    blocks: list[int]


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_freed: Callable[[Sequence[int]], None] | None = None  # is told of blocks that nobody owns any more
        self._free = list(range(num_blocks))  # a heap
        self._holdings: dict[Owner, Holding] = {}
        self._last_generation = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_used(self, use: Use) -> int:
        return sum(len(holding.blocks) for holding in self._holdings.values() if holding.use == use)

    def holding(self, owner: Owner) -> Holding | None:
        return self._holdings.get(owner)

    def owners(self) -> list[Owner]:
        return list(self._holdings)

    def allocate(self, owner: Owner, num_blocks: int, use: Use) -> Holding | None:
        """Give `owner` its first blocks under a new generation; None when that many are not free."""
        assert owner not in self._holdings, f"{owner} holds blocks already"
        if num_blocks > len(self._free):
            return None
        self._last_generation += 1
        holding = Holding(self._last_generation, use, self._take(num_blocks))
        self._holdings[owner] = holding
        return holding

    def extend(self, owner: Owner, num_blocks: int) -> bool:
        """Give `owner` more blocks at the end of its table; False, and nothing changed, when they are not free."""
        if num_blocks > len(self._free):
            return False
        self._holdings[owner].blocks.extend(self._take(num_blocks))
        return True

    def adopt(self, heir: Owner, owner: Owner) -> Holding:
        """Everything `owner` holds becomes `heir`'s, under a new generation: what was sent to `owner` is late now."""
        assert heir not in self._holdings, f"{heir} holds blocks already"
        holding = self._holdings.pop(owner)
        self._last_generation += 1
        holding.generation = self._last_generation
        self._holdings[heir] = holding
        return holding

    def promote(self, owner: Owner) -> None:
        """A granted holding becomes a sequence's; blocks and generation stay."""
        self._holdings[owner].use = "sequence"

    def release(self, owner: Owner) -> None:
        """Take back everything `owner` holds; an owner that holds nothing is fine, so every exit may call this."""
        holding = self._holdings.pop(owner, None)
        if holding is None:
            return
        for block in holding.blocks:
            heapq.heappush(self._free, block)
        if self.on_freed is not None:
            self.on_freed(holding.blocks)

    def check(self) -> None:
        """Assert I1: every block is free or held by exactly one owner."""
        held = [block for holding in self._holdings.values() for block in holding.blocks]
        assert len(held) + len(self._free) == self.num_blocks, "blocks were lost or invented"
        assert len({*held, *self._free}) == self.num_blocks, "a block has two owners"
        generations = [holding.generation for holding in self._holdings.values()]
        assert len(set(generations)) == len(generations), "two owners share a generation"

    def _take(self, num_blocks: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(num_blocks)]
