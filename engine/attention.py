"""The seam between Hugging Face's attention modules and our paged cache.

Each attention layer of an unchanged model calls `_attend` (found by name through AttentionInterface) and hands it the
step that `ModelEngine.step` gave to the model as one keyword argument. No mask function is registered for the name, so
transformers builds no mask.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from ..cluster.protocol.errors import UnsupportedModelError
from ..kernels.kv_rows import write_kv
from ..kernels.paged_attention import AttentionOptions, PagedBatch, paged_attention
from .kv_cache import KVCache
from .sequence import LayerWritten

ATTENTION_NAME = "twinpool"
REFUSED_ARGUMENTS = ("position_bias", "relative_position_bias", "attention_bias", "alibi")


class AttentionStep(Protocol):
    """What a forward pass does with each layer's query, key and value, all `[tokens, heads, head_dim]`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor: ...


@dataclass(frozen=True)
class CachedStep:
    """Write keys and values into the cache, say so, then attend over it."""

    cache: KVCache
    batch: PagedBatch
    on_layer: LayerWritten | None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer_cache = self.cache.layers[layer]
        write_kv(layer_cache, self.batch.row_ids, key, value)
        if self.on_layer is not None:
            self.on_layer(layer)
        return paged_attention(query, key, value, layer_cache, self.batch, options)


@dataclass(frozen=True)
class LayerCall:
    """What one attention call looked like."""

    layer: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None


@dataclass(frozen=True)
class ProbeStep:
    """Note what each layer asks for and attend to nothing: how `load_engine` finds out whether it can serve a model."""

    calls: list[LayerCall] = field(default_factory=list[LayerCall])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        shape = (query.shape[1], key.shape[1], key.shape[2], value.shape[2])
        self.calls.append(LayerCall(layer, *shape, options.sliding_window))
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def register_attention() -> None:
    """Make `attn_implementation="twinpool"` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, tokens, head_dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    twinpool_step: AttentionStep | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    name = type(module).__name__
    if twinpool_step is None:
        raise UnsupportedModelError(f"{name} does not receive the keyword arguments that the model was called with")
    refused = [argument for argument in REFUSED_ARGUMENTS if others.get(argument) is not None]
    if attention_mask is not None:
        refused.append("attention_mask")
    if refused:
        raise UnsupportedModelError(f"{name} adds {', '.join(refused)} to its attention scores, which is not supported")
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise UnsupportedModelError(f"{name} attends to later tokens; only causal attention can be cached")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError(f"{name} does not say which layer it is (layer_idx)")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [tokens, heads, head_dim]
    return twinpool_step.attend(layer, query, key, value, options).unsqueeze(0), None
