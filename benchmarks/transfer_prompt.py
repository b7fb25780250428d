"""What transfer.py moves: the keys and values of one prompt, cut into frames; and what moves it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
from twinpool.kvtransfer.layout import KVLayout
from twinpool.kvtransfer.sender import Sender, SenderLimits, SendFrame

BLOCK_SIZE = 16
LEASE_S = 30.0


@dataclass(frozen=True)
class Prompt:
    """Whose keys and values are moved."""

    layout: KVLayout
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return self.layout.token_bytes * self.num_tokens

    @lru_cache  # noqa: B019  (one prompt a process)
    def frames(self, frame_bytes: int) -> tuple[int, ...]:
        """Return the payloads' sizes, as our sender cuts them."""
        sender = Sender(self.layout, frame_limits(frame_bytes))
        sender.open(("r", 1), 1, 2 * self.num_bytes, 0)
        for layer in range(self.layout.num_layers):
            sender.layer_written(("r", 1), layer, range(self.num_tokens))
        sizes: list[int] = []
        while isinstance(command := sender.next_command(0.0), SendFrame):
            sizes.append(self.layout.frame_bytes(len(command.layers), len(command.tokens)))
            sender.frame_sent(command.key, sizes[-1], 0)
        return tuple(sizes)

    def places(self, frame_bytes: int) -> list[tuple[int, int]]:
        """Return where each frame begins, and its size, when they lie one behind the other."""
        sizes = self.frames(frame_bytes)
        return list(zip(accumulate(sizes, initial=0), sizes, strict=False))

    def block_table(self, seed: int) -> list[int]:
        """Return the blocks in a random order, as a pool that has been in use for long gives them out."""
        order = np.random.default_rng(seed).permutation(-(-self.num_tokens // BLOCK_SIZE))
        return [int(block) for block in order]


class End(Protocol):
    @property
    def addresses(self) -> Sequence[str]: ...

    def expect(self, frame_bytes: int) -> None: ...

    def move(self, frame_bytes: int) -> None: ...

    def clear(self) -> None: ...

    def digest(self) -> int: ...


def frame_limits(frame_bytes: int) -> SenderLimits:
    return SenderLimits(max_frame_bytes=frame_bytes, min_frame_bytes=frame_bytes, lease_s=LEASE_S)
