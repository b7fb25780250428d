"""Pack the rows of one step: token ids, positions, where each key and value lies, and whose logits are wanted.

Runs once a step, between the scheduler and the model; all layers share what it builds. Knows sequences and blocks,
but no model.
"""

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.kv_rows import key_row_ids
from ..kernels.paged_attention import Chunk, DecodeGroup, PagedBatch
from .sequence import ScheduledRow

# A further group costs a layer about as much time as attending over this many more tokens (measured, CPU).
MAX_PADDING_TOKENS = 256


@dataclass(frozen=True)
class StepBatch:
    input_ids: Tensor  # [1, tokens]
    position_ids: Tensor  # [1, tokens]
    logits_to_keep: Tensor  # [sampling rows + scored tokens], positions in the packed row
    sampling_rows: tuple[int, ...]  # their indices among the rows given
    paged: PagedBatch


@dataclass(frozen=True)
class _PlacedRow:
    row: ScheduledRow
    offset: int  # of its first token in the packed row

    @property
    def num_tokens(self) -> int:
        return self.row.end - self.row.start

    @property
    def scoring(self) -> range:
        """Places in the packed row whose logits score a token of the prompt."""
        scored = self.row.scored
        return range(self.offset + scored.start - 1 - self.row.start, self.offset + scored.stop - 1 - self.row.start)


def build_batch(rows: AnySequence[ScheduledRow], block_size: int, device: torch.device) -> StepBatch:
    """Pack `rows` in the order given. Each holds at least one token, and its block table covers all of them."""
    placed: list[_PlacedRow] = []
    num_tokens = 0
    for row in rows:
        assert row.start < row.end <= len(row.sequence.token_ids), "a row holds at least one known token"
        assert row.end <= len(row.sequence.block_table) * block_size, "a row's tokens all have a block"
        placed.append(_PlacedRow(row, num_tokens))
        num_tokens += row.end - row.start
    token_ids = np.concatenate([np.asarray(r.sequence.token_ids[r.start : r.end], dtype=np.int64) for r in rows])
    positions = np.concatenate([np.arange(r.start, r.end, dtype=np.int64) for r in rows])
    row_ids = [key_row_ids(r.sequence.block_table, range(r.start, r.end), block_size) for r in rows]
    sampling = tuple(i for i, row in enumerate(rows) if row.samples)
    last_places = [placed[i].offset + placed[i].num_tokens - 1 for i in sampling]
    paged = PagedBatch(
        row_ids=torch.from_numpy(np.concatenate(row_ids)).to(device),
        chunks=tuple(_chunk(p, block_size, device) for p in placed if p.num_tokens > 1),
        decode_groups=_decode_groups([p for p in placed if p.num_tokens == 1], block_size, device),
    )
    return StepBatch(
        input_ids=torch.from_numpy(token_ids).unsqueeze(0).to(device),
        position_ids=torch.from_numpy(positions).unsqueeze(0).to(device),
        logits_to_keep=_indices(last_places + [place for p in placed if p.row.scored for place in p.scoring], device),
        sampling_rows=sampling,
        paged=paged,
    )


def _chunk(placed: _PlacedRow, block_size: int, device: torch.device) -> Chunk:
    row = placed.row
    cells = None if row.start == 0 else _indices(_key_cells(row, block_size), device)
    return Chunk(placed.offset, placed.offset + placed.num_tokens, row.end, cells)


def _decode_groups(placed: list[_PlacedRow], block_size: int, device: torch.device) -> tuple[DecodeGroup, ...]:
    """Sort by length and cut into groups, so that no group pads more than MAX_PADDING_TOKENS."""
    groups: list[list[_PlacedRow]] = []
    num_padding_tokens = 0
    for one in sorted(placed, key=lambda p: p.row.end, reverse=True):
        num_padding_tokens += groups[-1][0].row.end - one.row.end if groups else 0
        if not groups or num_padding_tokens > MAX_PADDING_TOKENS:
            groups.append([])
            num_padding_tokens = 0
        groups[-1].append(one)
    return tuple(_decode_group(group, block_size, device) for group in groups)


def _decode_group(group: list[_PlacedRow], block_size: int, device: torch.device) -> DecodeGroup:
    num_padded_blocks = -(-group[0].row.end // block_size)
    cells: list[int] = []
    for placed in group:
        own = _key_cells(placed.row, block_size)
        cells += own + own[:1] * (num_padded_blocks - len(own))  # padding reads a block of its own sequence, masked
    return DecodeGroup(
        queries=_indices([placed.offset for placed in group], device),
        key_cells=_indices(cells, device),
        context_lengths=_indices([placed.row.end for placed in group], device),
    )


def _key_cells(row: ScheduledRow, block_size: int) -> list[int]:
    """The half-blocks that hold this context's keys; its values lie in the next one each."""
    return [2 * block for block in row.sequence.block_table[: -(-row.end // block_size)]]


def _indices(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
