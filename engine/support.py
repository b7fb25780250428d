"""Which models the engine serves exactly; everything else is refused at load, by name.

`check_config` reads the configuration before any weight is loaded; `check_calls` compares what the loaded model's
layers really asked of the attention with what the configuration promised.
"""

from collections.abc import Sequence
from typing import Any

from ..cluster.protocol.errors import UnsupportedModelError
from ..kvtransfer.layout import KVLayout
from .attention import LayerCall

HINT = "serve a decoder-only model with full or sliding-window attention, such as Llama, Qwen3 or Mistral"
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")
REFUSED_ROPE_TYPES = ("dynamic", "longrope")
# (config attribute, what its being set means)
REFUSED_ATTRIBUTES = (
    ("is_encoder_decoder", "an encoder-decoder"),
    ("kv_lora_rank", "multi-head latent attention (MLA)"),
    ("relative_attention_num_buckets", "a relative position bias"),
    ("alibi", "an ALiBi position bias"),
    ("num_kv_shared_layers", "layers that share another layer's KV"),
    ("use_bidirectional_attention", "bidirectional attention"),
    ("ssm_cfg", "state-space (Mamba) layers"),
    ("mamba_d_state", "state-space (Mamba) layers"),
    ("state_size", "state-space (Mamba) layers"),
    ("conv_L_cache", "short-convolution layers"),
)


def check_config(config: Any) -> None:
    """Raise UnsupportedModelError naming the first thing in a model's configuration that cannot be served."""
    for attribute, meaning in REFUSED_ATTRIBUTES:
        if getattr(config, attribute, None):
            raise _refusal(config, f"it has {meaning} ({attribute}={getattr(config, attribute)!r})")
    for rope_type in _rope_types(config):
        if rope_type in REFUSED_ROPE_TYPES:
            raise _refusal(config, f"its {rope_type!r} RoPE depends on the longest sequence of a batch")
    for layer_type in layer_types(config):
        if layer_type not in SUPPORTED_LAYER_TYPES:
            raise _refusal(config, f"it has layers of type {layer_type!r}; supported are {SUPPORTED_LAYER_TYPES}")


def check_calls(config: Any, calls: Sequence[LayerCall], layout: KVLayout) -> None:
    """Raise UnsupportedModelError unless every layer attended once, in order, with the KV shape of `layout`."""
    if [call.layer for call in calls] != list(range(layout.num_layers)):
        raise _refusal(
            config, f"{len({call.layer for call in calls})} of its {layout.num_layers} layers attend once, in order"
        )
    expected = (layout.num_kv_heads, layout.head_dim, layout.head_dim)
    for call, layer_type in zip(calls, layer_types(config) or ["full_attention"] * len(calls), strict=True):
        got = (call.num_kv_heads, call.key_dim, call.value_dim)
        if got != expected:
            raise _refusal(config, f"layer {call.layer} has (KV heads, key dim, value dim) {got}, not {expected}")
        if call.num_heads % call.num_kv_heads:
            raise _refusal(config, f"{call.num_heads} query heads do not divide among {call.num_kv_heads} KV heads")
        if layer_type == "sliding_attention" and call.sliding_window is None:
            raise _refusal(config, f"layer {call.layer} slides its window by a mask only, which is not built here")


def layer_types(config: Any) -> list[str]:
    """Return the type of each layer, or nothing when all are alike and full."""
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])


def _rope_types(config: Any) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Some models hold one set of parameters a layer type.
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [str(one.get("rope_type") or one.get("type")) for one in sets]


def _refusal(config: Any, reason: str) -> UnsupportedModelError:
    kind = getattr(config, "model_type", None) or type(config).__name__
    return UnsupportedModelError(f"a model of type {kind!r} cannot be served exactly: {reason}", hint=HINT)
