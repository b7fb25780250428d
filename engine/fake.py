"""An engine without a model, for protocol tests: its tokens are a hash of the KV bytes it holds.

A key or value row depends on every token up to it; the next token depends on every row of the sequence in every layer.
So one wrong, stale, missing or swapped byte anywhere changes the answer. `expected_tokens`
and `expected_scores` are the oracles.
"""

import time
from collections.abc import Sequence as AnySequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..cluster.protocol.messages import KVLayoutInfo, ModelIdentity, SampledToken, SamplingParams
from ..kvtransfer.layout import KVLayout
from .sequence import LayerWritten, ScheduledRow, Sequence, StepOutput

FAKE_LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, dtype="float32")
ROW_BYTES = 16
POISON_BYTE = 0xA5


class FakeEngine:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 256,
        max_model_len: int = 4096,
        seconds_per_row: float = 0.0,
        name: str = "fake",
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._seconds_per_row = seconds_per_row
        self._name = name
        shape = (FAKE_LAYOUT.num_layers, 2, num_blocks * block_size, ROW_BYTES)
        self._rows = np.zeros(shape, dtype=np.uint8)  # [num_layers, 2, slots, row bytes]

    @property
    def identity(self) -> ModelIdentity:
        layout = KVLayoutInfo(
            num_layers=FAKE_LAYOUT.num_layers,
            num_kv_heads=FAKE_LAYOUT.num_kv_heads,
            head_dim=FAKE_LAYOUT.head_dim,
            dtype=FAKE_LAYOUT.dtype,
        )
        return ModelIdentity(
            model=self._name, fingerprint=f"fake-{self._vocab_size}", dtype=FAKE_LAYOUT.dtype, layout=layout
        )

    @property
    def layout(self) -> KVLayout:
        return FAKE_LAYOUT

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def step(self, rows: AnySequence[ScheduledRow], on_layer: LayerWritten | None = None) -> StepOutput:
        """Write the rows' keys and values layer by layer, then hash. Takes `seconds_per_row` a row."""
        chain = [value.to_bytes(8, "little") for row in rows for value in self._chains(row)]
        tables = [self._slots(row.sequence.block_table, range(row.start, row.end)) for row in rows]
        slots = np.concatenate(tables) if tables else np.zeros(0, dtype=np.int64)
        for layer in range(FAKE_LAYOUT.num_layers):
            for kv in (0, 1):
                written = b"".join(_row(value, layer, kv) for value in chain)
                self._rows[layer, kv, slots] = np.frombuffer(written, dtype=np.uint8).reshape(-1, ROW_BYTES)
            if on_layer is not None:
                on_layer(layer)
        if self._seconds_per_row:
            time.sleep(self._seconds_per_row * len(rows))
        sampled = [self._next_token(row) if row.samples else None for row in rows]
        return StepOutput(sampled, [[self._score(row.sequence, i) for i in row.scored] for row in rows])

    def gather(self, block_table: AnySequence[int], layers: range, tokens: range) -> memoryview:
        slots = self._slots(block_table, tokens)
        return memoryview(self._rows[layers.start : layers.stop, :, slots].tobytes())

    def scatter(self, block_table: AnySequence[int], layers: range, tokens: range, payload: memoryview) -> None:
        slots = self._slots(block_table, tokens)
        shape = (len(layers), 2, len(tokens), ROW_BYTES)
        self._rows[layers.start : layers.stop, :, slots] = np.frombuffer(payload, dtype=np.uint8).reshape(shape)

    def poison(self, blocks: AnySequence[int]) -> None:
        slots = self._slots(blocks, range(len(blocks) * self._block_size))
        self._rows[:, :, slots] = POISON_BYTE

    def _slots(self, block_table: AnySequence[int], tokens: range) -> NDArray[np.int64]:
        """Return `[len(tokens)]`: where each of the tokens lies."""
        size = self._block_size
        first = tokens.start // size
        blocks = np.asarray(block_table[first : -(-tokens.stop // size)], dtype=np.int64)
        slots = (blocks[:, None] * size + np.arange(size)).ravel()
        return slots[tokens.start - first * size : tokens.stop - first * size]

    def _chains(self, row: ScheduledRow) -> list[int]:
        """Return one number a new token, each a hash of the one before it (read from the cache) and the token."""
        value = 0
        if row.start:
            slot = self._slots(row.sequence.block_table, range(row.start - 1, row.start))[0]
            value = int.from_bytes(self._rows[0, 0, slot, :8].tobytes(), "little")
        chain: list[int] = []
        for token in row.sequence.token_ids[row.start : row.end]:
            value = _chain(value, token)
            chain.append(value)
            value = int.from_bytes(_row(value.to_bytes(8, "little"), 0, 0)[:8], "little")
        return chain

    def _next_token(self, row: ScheduledRow) -> SampledToken:
        slots = self._slots(row.sequence.block_table, range(row.end))
        digest = xxhash.xxh3_64_intdigest(self._rows[:, :, slots].tobytes(), seed=row.sequence.sampling.seed % 2**64)
        return SampledToken(token=digest % self._vocab_size)

    def _score(self, sequence: Sequence, index: int) -> SampledToken:
        """Score token `index` by a hash of the rows before it: the token itself as likely as the hash says."""
        slots = self._slots(sequence.block_table, range(index))
        token = sequence.token_ids[index]
        digest = xxhash.xxh3_64_intdigest(self._rows[:, :, slots].tobytes(), seed=token)
        others = [(digest + i) % self._vocab_size for i in range(sequence.sampling.num_logprobs or 0)]
        top = tuple((other, -float(i)) for i, other in enumerate(others))
        return SampledToken(token=token, logprob=-(digest % 10_000) / 1000, top=top)


def expected_scores(prompt: AnySequence[int], num_logprobs: int = 0, vocab_size: int = 256) -> list[SampledToken]:
    """Return what any number of FakeEngines must say of the tokens of `prompt` from the second on."""
    length = len(prompt)
    engine = FakeEngine(num_blocks=1, block_size=length, vocab_size=vocab_size, max_model_len=length)
    sampling = SamplingParams(scores_prompt=True, num_logprobs=num_logprobs)
    sequence = Sequence("oracle", 1, list(prompt), length, sampling, block_table=[0])
    return engine.step([ScheduledRow(sequence, 0, length, samples=False)]).scores[0]


def expected_tokens(prompt: AnySequence[int], num_tokens: int, vocab_size: int = 256, seed: int = 0) -> list[int]:
    """Return what any number of FakeEngines must answer to `prompt`, whatever happens on the way."""
    length = len(prompt) + num_tokens
    engine = FakeEngine(num_blocks=1, block_size=length, vocab_size=vocab_size, max_model_len=length)
    sequence = Sequence("oracle", 1, list(prompt), len(prompt), SamplingParams(seed=seed), block_table=[0])
    outputs: list[int] = []
    while len(outputs) < num_tokens:
        row = ScheduledRow(sequence, sequence.num_computed_tokens, len(sequence.token_ids), samples=True)
        sampled = engine.step([row]).sampled[0]
        assert sampled is not None
        sequence.num_computed_tokens = row.end
        sequence.token_ids.append(sampled.token)
        outputs.append(sampled.token)
    return outputs


def _chain(value: int, token: int) -> int:
    return xxhash.xxh3_64_intdigest(token.to_bytes(8, "little"), seed=value)


def _row(value: bytes, layer: int, kv: int) -> bytes:
    """Return the row of 16 bytes that token `value` has in this layer; its first half tells the chain onwards."""
    return xxhash.xxh3_128_digest(value, seed=2 * layer + kv)
