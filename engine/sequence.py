"""What the schedulers, the workers and both engines share: a sequence, a scheduled row, and the engine's interface.

Knows no torch. A row may hold any number of new tokens: a prompt's chunk, one decode token, or (later) 1 + k drafts.
"""

from collections.abc import Callable, Collection, Sequence as AnySequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..cluster.protocol.messages import ModelIdentity, SampledToken, SamplingParams
from ..kvtransfer.layout import KVLayout


class Matcher(Protocol):
    """How far a sequence's output has come in its grammar; grammar.GrammarMatcher, which the schedulers do not know."""

    def allowed(
        self, output: AnySequence[int], end_ids: Collection[int], num_tokens: int | None = None
    ) -> NDArray[np.bool_]: ...


@dataclass
class Sequence:
    """A request's state inside one engine.

    `token_ids` holds the prompt and every output token so far. The key and value of token i are in the cache when
    i < `num_computed_tokens`; they lie in block `block_table[i // block_size]`, offset `i % block_size`.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int  # without outputs of earlier attempts
    sampling: SamplingParams
    arrival_order: int = 0
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list[int])
    matcher: Matcher | None = field(default=None, repr=False, compare=False)  # made by the engine, when needed

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class ScheduledRow:
    """Tokens [start, end) of `sequence` run in this step; `samples` when the logits of token end - 1 are wanted."""

    sequence: Sequence
    start: int
    end: int
    samples: bool

    @property
    def scored(self) -> range:
        """The tokens of the prompt that this row's logits score: the logits of token i are about token i + 1."""
        if not self.sequence.sampling.scores_prompt:
            return range(0)
        return range(self.start + 1, min(self.end + 1, self.sequence.num_prompt_tokens))


@dataclass(frozen=True)
class StepOutput:
    """What a step says of its rows, in their order."""

    sampled: list[SampledToken | None]  # None where the row does not sample
    scores: list[list[SampledToken]]  # log-probabilities of the tokens in the row's `scored`, mostly none
    failures: dict[int, str] = field(default_factory=dict[int, str])  # rows that no worker could sample → why

    def without_failures(self, rows: AnySequence[ScheduledRow]) -> tuple[list[ScheduledRow], "StepOutput"]:
        """Return the rows that went well, with what the step says of them."""
        kept = [i for i in range(len(rows)) if i not in self.failures]
        return [rows[i] for i in kept], StepOutput([self.sampled[i] for i in kept], [self.scores[i] for i in kept])


LayerWritten = Callable[[int], None]


class Engine(Protocol):
    """One model with its KV cache. Two implementations: model.ModelEngine and fake.FakeEngine.

    The methods are called from one thread, except `gather`, which the sender threads call for tokens whose keys and
    values are written and whose blocks stay owned until the transfer ends.
    """

    @property
    def identity(self) -> ModelIdentity: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def device_name(self) -> str:
        """What it computes on, as torch calls it: "cpu", "cuda:0"."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def step(self, rows: AnySequence[ScheduledRow], on_layer: LayerWritten | None = None) -> StepOutput:
        """Run one forward pass.

        Writes keys and values of every scheduled token; calls `on_layer(layer)` as soon as a layer's are written.
        Changes no sequence but for its matcher.
        """
        ...

    def gather(self, block_table: AnySequence[int], layers: range, tokens: range) -> memoryview:
        """Copy rows out of the cache: `[len(layers), 2, len(tokens), row_bytes]`, a fresh buffer each call."""
        ...

    def scatter(self, block_table: AnySequence[int], layers: range, tokens: range, payload: memoryview) -> None:
        """Copy such a buffer into the cache; its length must be `layout.frame_bytes(len(layers), len(tokens))`."""
        ...

    def poison(self, blocks: AnySequence[int]) -> None:
        """Overwrite these blocks in every layer with what no model computes, so that reading them shows."""
        ...
