"""The measured cost model: how long a pass, a step or a transfer takes. Pure; one for router, simulator and planner.

A pass costs the larger of a floor (reading the weights) and `overhead + per token`, and `per token²` for its attention;
a decode step costs `base + per sequence + per cached token`, with a second set of constants for large batches where the
data asks for it.
`CostProfile` is what the calibrator publishes; `CostModel` is the bare numbers that follow from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Literal

FuseRule = Literal["max", "sum", "roofline"]
Row = tuple[int, int]  # of one pass: (tokens cached before it, tokens it computes)
MAX_CHUNKING_STRETCH = 1.2  # up to here a longer prefill is cheaper than a second pool


@dataclass(frozen=True)
class DecodeCost:
    """One regime of decode steps, seconds."""

    base_s: float = 0.0
    per_sequence_s: float = 0.0
    per_cached_token_s: float = 0.0

    def step_s(self, num_sequences: int, num_cached_tokens: float) -> float:
        return self.base_s + self.per_sequence_s * num_sequences + self.per_cached_token_s * num_cached_tokens


@dataclass(frozen=True)
class Capacity:
    """What one worker holds. None: without limit."""

    num_blocks: int | None = None
    block_size: int = 32
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    @property
    def num_tokens(self) -> float:
        return inf if self.num_blocks is None else self.num_blocks * self.block_size


@dataclass(frozen=True)
class CostModel:
    """Costs of one kind of worker. Every default is "costs nothing", so that textbook cases can be written down."""

    prefill_floor_s: float = 0.0  # no pass is shorter: the weights are read once
    prefill_overhead_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_per_token_sq_s: float = 0.0  # attention: times (end² - start²) of each prompt's tokens
    prefill_per_pass_token_sq_s: float = 0.0  # times (all tokens of the pass)²: long passes outgrow the caches
    decode: DecodeCost = DecodeCost()
    decode_large: DecodeCost | None = None  # steps of at least `decode_knee_sequences`
    decode_knee_sequences: int = 0
    fuse: FuseRule = "max"
    transfer_latency_s: float = 0.0
    transfer_bytes_per_s: float = inf
    kv_bytes_per_token: int = 0
    request_overhead_s: float = 0.0  # a request's way through HTTP, router and grant, and its first token's way back
    prefill_sending: float = 1.0  # how many times longer a PROMPT worker's pass takes, because its KV leaves meanwhile
    prefill_contention: float = 1.0  # how much slower a prefill pass is while a decode step runs on the same host
    decode_contention: float = 1.0  # how much slower a decode step is while a prefill pass runs on the same host
    prompt: Capacity = field(default_factory=Capacity)
    completion: Capacity = field(default_factory=Capacity)

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Return the time of a pass over one prompt's next `num_tokens`."""
        return self.pass_s([(num_cached_tokens, num_tokens)])

    def pass_s(self, rows: Iterable[Row]) -> float:
        """Return the time of one prefill pass over several prompts' chunks."""
        num_tokens, attended = _sums(rows)
        return max(self.prefill_floor_s, self._dense_s(num_tokens)) + self.prefill_per_token_sq_s * attended

    def sent_pass_s(self, rows: Iterable[Row]) -> float:
        """Return the time of such a pass on a PROMPT worker, which sends the KV away while it computes."""
        return self.pass_s(rows) * self.prefill_sending

    def decode_s(self, num_sequences: int, num_cached_tokens: float) -> float:
        """Return the time of one decode step; `num_cached_tokens` is the sum over its sequences."""
        return self._regime(num_sequences).step_s(num_sequences, num_cached_tokens)

    def fused_s(self, rows: Iterable[Row], num_sequences: int, num_cached_tokens: float) -> float:
        """Return the time of a pass that runs prompt chunks and one decode token of each running sequence.

        `max` and `sum` combine the two times; `roofline` lets the weights be read and the matrices be multiplied once
        for all tokens, and adds what attention reads for each. It lies between the other two.
        """
        chunks = list(rows)
        if not chunks or not num_sequences:
            return self.pass_s(chunks) if chunks else self.decode_s(num_sequences, num_cached_tokens)
        prefill_s, decode_s = self.pass_s(chunks), self.decode_s(num_sequences, num_cached_tokens)
        if self.fuse == "max":
            return max(prefill_s, decode_s)
        if self.fuse == "sum":
            return prefill_s + decode_s
        num_tokens, attended = _sums(chunks)
        base_s = self._regime(num_sequences).base_s
        shared_s = max(self._dense_s(num_tokens + num_sequences), self.prefill_floor_s, base_s)
        attention_s = self.prefill_per_token_sq_s * attended + decode_s - base_s
        return min(shared_s + attention_s, prefill_s + decode_s)

    def transfer_s(self, num_tokens: int) -> float:
        """Return the time the KV of `num_tokens` takes over an idle link."""
        return self.transfer_latency_s + num_tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s

    def chunk_size(self, num_sequences: int = 1, num_cached_tokens: float = 0.0) -> float:
        """Return C*, the prompt tokens a pass computes in the time of the decode step that rides with it.

        Smaller chunks shorten no gap between tokens. Negative or tiny: chunking has no room here, split the phases.
        Attention between the prompt's tokens is left out, as in the published rule.
        """
        room_s = self.decode_s(num_sequences, num_cached_tokens) - self.prefill_overhead_s
        return room_s / self.prefill_per_token_s if self.prefill_per_token_s else inf

    def chunk_size_within(self, target_s: float, num_sequences: int = 0, num_cached_tokens: float = 0.0) -> float:
        """Return the most tokens of a prompt's first chunk whose fused pass takes at most `target_s`; 0 if none do."""
        if not num_sequences:
            return self._tokens_within(target_s, self.prefill_floor_s)
        decode_s = self.decode_s(num_sequences, num_cached_tokens)
        if self.fuse == "max":
            return self._tokens_within(target_s, self.prefill_floor_s) if decode_s <= target_s else 0.0
        apart = self._tokens_within(target_s - decode_s, self.prefill_floor_s)
        if self.fuse == "sum":
            return apart
        base_s = self._regime(num_sequences).base_s
        fused = self._tokens_within(target_s - decode_s + base_s, max(self.prefill_floor_s, base_s), num_sequences)
        return max(fused, apart)

    def overhead_share(self, num_sequences: int = 1, num_cached_tokens: float = 0.0) -> float:
        """Return what part of a decode step one more pass costs before it has computed anything."""
        decode_s = self.decode_s(num_sequences, num_cached_tokens)
        return self.prefill_overhead_s / decode_s if decode_s else inf

    def chunking_stretch(self, num_sequences: int = 1, num_cached_tokens: float = 0.0) -> float:
        """Return how many times longer a long prompt's prefill takes in chunks of C*; inf where C* is not positive."""
        share = self.overhead_share(num_sequences, num_cached_tokens)
        return 1 / (1 - share) if share < 1 else inf

    def chunk_or_split(self, num_sequences: int = 1, num_cached_tokens: float = 0.0) -> Literal["chunk", "split"]:
        """Read C*: whether to fuse chunks with decode steps here, or to give the phases workers of their own."""
        stretch = self.chunking_stretch(num_sequences, num_cached_tokens)
        return "chunk" if stretch <= MAX_CHUNKING_STRETCH else "split"

    def _dense_s(self, num_tokens: int) -> float:
        per_token_s = self.prefill_per_token_s + self.prefill_per_pass_token_sq_s * num_tokens
        return self.prefill_overhead_s + per_token_s * num_tokens

    def _tokens_within(self, target_s: float, lowest_s: float, num_riding: int = 0) -> float:
        """Solve max(lowest, dense(n + riding)) + per token² · n² = target for n."""
        attention_s, dense_sq_s = self.prefill_per_token_sq_s, self.prefill_per_pass_token_sq_s
        room_s = target_s - self._dense_s(num_riding)
        if target_s < lowest_s or room_s <= 0:
            return 0.0
        slope_s = self.prefill_per_token_s + 2 * dense_sq_s * num_riding
        divisor = slope_s + sqrt(slope_s**2 + 4 * (attention_s + dense_sq_s) * room_s)
        tokens = 2 * room_s / divisor if divisor else inf
        return min(tokens, sqrt((target_s - lowest_s) / attention_s)) if attention_s else tokens

    def _regime(self, num_sequences: int) -> DecodeCost:
        if self.decode_large is not None and num_sequences >= self.decode_knee_sequences:
            return self.decode_large
        return self.decode


def _sums(rows: Iterable[Row]) -> tuple[int, int]:
    """Return a pass's new tokens, and the sum of (end² - start²): what attention compares, times two."""
    num_tokens = attended = 0
    for cached, new in rows:
        num_tokens += new
        attended += (cached + new) ** 2 - cached**2
    return num_tokens, attended
