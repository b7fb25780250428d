"""Which sequences the next step of a COMPLETION worker decodes: continuous batching. Pure.

Each step decodes one token of every running sequence, up to the token budget, taking turns beyond it. When a sequence
needs a block and none is free, the newest sequence is preempted: its owner hands it back to the router.
"""

from .block_pool import BlockPool, Owner, blocks_for
from .sequence import ScheduledRow, Sequence


class DecodeScheduler:
    def __init__(self, pool: BlockPool, block_size: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._budget = max_num_batched_tokens
        self._running: dict[Owner, Sequence] = {}

    def __len__(self) -> int:
        return len(self._running)

    def get(self, key: Owner) -> Sequence | None:
        return self._running.get(key)

    def keys(self) -> list[Owner]:
        return list(self._running)

    def has_headroom(self, num_blocks: int) -> bool:
        """Room for a grant, and a block for every running sequence, so that a grant preempts nobody soon."""
        return num_blocks + len(self._running) <= self._pool.num_free

    def add(self, sequence: Sequence) -> None:
        self._running[sequence.key] = sequence

    def remove(self, key: Owner) -> None:
        """Forget a sequence; its blocks are the caller's to release. An unknown key is fine."""
        self._running.pop(key, None)

    def schedule(self) -> tuple[list[ScheduledRow], list[Sequence]]:
        """Return the next step's rows and the sequences that had to give up their blocks, newest first.

        Preempted sequences are removed and their blocks released. The oldest sequence is served first, so it always
        gets on unless it cannot fit by itself.
        """
        rows: list[ScheduledRow] = []
        preempted: list[Sequence] = []
        for sequence in self._next_in_turn():
            if sequence.key not in self._running:
                continue  # preempted a moment ago
            while not self._has_room(sequence):
                newest = max(self._running.values(), key=lambda s: (s.arrival_order, *s.key))
                self._preempt(newest)
                preempted.append(newest)
                if newest is sequence:
                    break
            else:
                rows.append(self._row(sequence))
        rows = [row for row in rows if row.sequence.key in self._running]
        if not rows and self._running:  # this turn's sequences all gave way to some whose turn it was not
            rows, others = self.schedule()
            preempted += others
        return rows, preempted

    def _next_in_turn(self) -> list[Sequence]:
        if len(self._running) <= self._budget:
            return sorted(self._running.values(), key=lambda s: s.arrival_order)
        turn = list(self._running.values())[: self._budget]
        for sequence in turn:  # to the back of the line
            self._running[sequence.key] = self._running.pop(sequence.key)
        return sorted(turn, key=lambda s: s.arrival_order)

    def _has_room(self, sequence: Sequence) -> bool:
        missing = blocks_for(len(sequence.token_ids), self._block_size) - len(sequence.block_table)
        return missing <= 0 or self._pool.extend(sequence.key, missing)

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence.key)
        self._pool.release(sequence.key)

    @staticmethod
    def _row(sequence: Sequence) -> ScheduledRow:
        return ScheduledRow(sequence, sequence.num_computed_tokens, len(sequence.token_ids), samples=True)
