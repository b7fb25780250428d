"""What a Hugging Face `config.json` says about costs: parameters, layers, heads, bytes. Reads no weights, no network.

Parameters are those of a decoder's matrices: embeddings, attention, an MLP or experts in its place; norms and biases, a
few in ten thousand, are left out. What would change the sizes and is not understood is refused by its key.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..config import DEFAULT_MODEL, cache_folder
from ..protocol.errors import ConfigError

DEFAULT_MODEL_FOLDER = "SmolLM2-135M-Instruct"  # where the default model is once it is converted
DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# Their MLPs have two matrices; gated ones have three.
PLAIN_MLP_MODELS = ("apertus", "arcee", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2")
# (key, what its being set means)
REFUSED = (
    ("kv_lora_rank", "multi-head latent attention (MLA), whose cache is compressed"),
    ("is_encoder_decoder", "an encoder beside the decoder"),
    ("num_kv_shared_layers", "layers that share another layer's KV"),
    ("hidden_size_per_layer_input", "embeddings of each layer"),
    ("per_layer_config", "layers of several shapes"),
    ("block_configs", "layers of several shapes"),
    ("interleave_moe_layer_step", "layers with and without experts in its own way"),
    ("ssm_cfg", "state-space (Mamba) layers"),
    ("mamba_d_state", "state-space (Mamba) layers"),
    ("state_size", "state-space (Mamba) layers"),
    ("conv_L_cache", "short-convolution layers"),
)
NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
NUM_SHARED_KEYS = ("n_shared_experts", "num_shared_experts")
EXPERT_KEYS = {
    *NUM_EXPERTS_KEYS,
    *NUM_SHARED_KEYS,
    *("num_experts_per_tok", "experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size"),
}
Config = Mapping[str, Any]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. Without experts, all parameters work on every token."""

    name: str
    num_params: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_param: float = 2.0
    bytes_per_kv_value: float = 2.0
    num_expert_params: int = 0  # those of `num_params` that routed experts hold
    num_experts: int = 0  # of one layer
    num_experts_per_token: int = 0
    remarks: tuple[str, ...] = ()  # what was assumed

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_active_params(self) -> float:
        """How many work on one token."""
        return self._params_of(self.num_experts_per_token / self.num_experts if self.num_experts else 1.0)

    @property
    def weights_bytes(self) -> float:
        return self.num_params * self.bytes_per_param

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv_value

    def read_bytes(self, num_tokens: int) -> float:
        """Return the weights that a pass reads, were its tokens routed to experts evenly and each on its own."""
        missed = (1 - self.num_experts_per_token / self.num_experts) ** num_tokens if self.num_experts else 0.0
        return self._params_of(1 - missed) * self.bytes_per_param

    def _params_of(self, share_of_experts: float) -> float:
        return self.num_params - self.num_expert_params * (1 - share_of_experts)


@dataclass(frozen=True)
class Bits:
    """A user's word on sizes that a config does not tell, such as those of quantised weights."""

    weight: float | None = None
    kv: float | None = None


def load_shape(model: str, bits: Bits | None = None) -> ModelShape:
    """Return the shape of `smollm2`, of a local folder or config.json, or of a hub id in the Hugging Face cache.

    Raises ConfigError naming what was not found, or the key that is missing or not understood.
    """
    path = find_config(model)
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a model's config: it holds no JSON object")
    return parse_shape(cast(dict[str, Any], config), model, str(path), bits or Bits())


def find_config(model: str) -> Path:
    """Return the path of a model's config.json on this machine. Raises ConfigError."""
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL:
        path = cache_folder() / "models" / DEFAULT_MODEL_FOLDER
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    if model == DEFAULT_MODEL:
        raise ConfigError(f"{model} is not in the cache yet: {path}", hint="`twinpool demo` fetches it")
    if path.is_dir():
        raise ConfigError(f"there is no config.json in {path}")
    cached = _find_in_hub_cache(model)
    if cached is None:
        raise ConfigError(
            f"{model!r} is neither {DEFAULT_MODEL!r} nor a folder, a config.json or a hub id in the Hugging Face cache",
            hint=f"nothing is downloaded here: `hf download {model} config.json` fetches the one file of a hub id",
        )
    return cached


def _find_in_hub_cache(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path, or nothing that the hub could know
        return None
    return Path(found) if isinstance(found, str) else None


def parse_shape(config: Config, name: str, source: str, bits: Bits) -> ModelShape:
    """Read a config's object. Raises ConfigError naming `source` and the key."""
    return _Reader(config, source).shape(name, bits)


class _Reader:
    """Reads one config; a composed one (text and images) by its language model."""

    def __init__(self, config: Config, source: str) -> None:
        nested = config.get("text_config")
        self.outer = config
        self.config: Config = cast(Config, nested) if isinstance(nested, dict) else config
        self.source = source
        self.remarks: list[str] = []
        if nested:
            self.remarks.append("only the language model is counted (text_config), not what reads images or sound")

    def shape(self, name: str, bits: Bits) -> ModelShape:
        self.refuse_the_unknown()
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise self.wrong("num_key_value_heads", f"{num_kv_heads} does not divide the {num_heads} attention heads")
        weight_bits, kv_bits = self.bits(bits)
        num_expert_params = self.num_moe_layers() * self.num_experts() * self.mlp_params(self.expert_width())
        return ModelShape(
            name=name,
            num_params=self.num_other_params(num_heads, num_kv_heads) + num_expert_params,
            num_layers=self.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim(num_heads),
            bytes_per_param=weight_bits / 8,
            bytes_per_kv_value=kv_bits / 8,
            num_expert_params=num_expert_params,
            num_experts=self.num_experts(),
            num_experts_per_token=self.integer("num_experts_per_tok") if self.num_experts() else 0,
            remarks=tuple(self.remarks),
        )

    def refuse_the_unknown(self) -> None:
        for key, meaning in REFUSED:
            if self.config.get(key):
                raise self.wrong(key, f"is set: {meaning}; this is not computed here")
        for layer_type in self.config.get("layer_types") or ():
            if layer_type not in LAYER_TYPES:
                raise self.wrong("layer_types", f"has {layer_type!r}; computed are {', '.join(LAYER_TYPES)}")
        for key, value in self.config.items():
            about_experts = "expert" in key or key.startswith("moe_")
            if about_experts and value and key not in EXPERT_KEYS and not isinstance(value, str | bool):
                raise self.wrong(key, f"{value!r} is not understood; known are {', '.join(sorted(EXPERT_KEYS))}")

    def num_other_params(self, num_heads: int, num_kv_heads: int) -> int:
        """Return all parameters but those of routed experts."""
        width, num_layers = self.integer("hidden_size"), self.integer("num_hidden_layers")
        attention = 2 * width * (num_heads + num_kv_heads) * self.head_dim(num_heads)
        tables = 1 if self.ties_embeddings() else 2
        num_moe_layers = self.num_moe_layers()
        moe = self.mlp_params(self.shared_width()) + width * self.num_experts() if num_moe_layers else 0
        dense = self.mlp_params(self.integer("intermediate_size")) if num_moe_layers < num_layers else 0
        blocks = num_layers * attention + num_moe_layers * moe + (num_layers - num_moe_layers) * dense
        return tables * self.integer("vocab_size") * width + blocks

    def mlp_params(self, inner_width: int) -> int:
        model_type = str(self.config.get("model_type", ""))
        activation = str(self.config.get("hidden_act") or self.config.get("hidden_activation") or "silu")
        is_plain = model_type in PLAIN_MLP_MODELS
        if not (is_plain or activation in ("silu", "swish") or model_type.startswith("gemma")):
            raise self.wrong(
                "hidden_act", f"{activation!r} leaves open how many matrices the MLP of model_type {model_type!r} has"
            )
        return (2 if is_plain else 3) * self.integer("hidden_size") * inner_width

    def num_experts(self) -> int:
        return max(self.integer(key, 0) for key in NUM_EXPERTS_KEYS)

    def num_moe_layers(self) -> int:
        if not self.num_experts():
            return 0
        first, step = self.integer("first_k_dense_replace", 0), self.integer("decoder_sparse_step", 1)
        dense: list[int] = self.config.get("mlp_only_layers") or []
        return sum((i + 1) % step == 0 and i not in dense for i in range(first, self.integer("num_hidden_layers")))

    def expert_width(self) -> int:
        if not self.num_experts():
            return 0
        return self.integer("moe_intermediate_size", 0) or self.integer("intermediate_size")

    def shared_width(self) -> int:
        width = self.integer("shared_expert_intermediate_size", 0) or self.integer("shared_intermediate_size", 0)
        return width or max(self.integer(key, 0) for key in NUM_SHARED_KEYS) * self.expert_width()

    def head_dim(self, num_heads: int) -> int:
        head_dim, width = self.integer("head_dim", 0), self.integer("hidden_size")
        if not head_dim and width % num_heads:
            raise self.wrong("head_dim", f"is missing, and hidden_size {width} is no multiple of {num_heads} heads")
        head_dim = head_dim or width // num_heads
        if self.integer("v_head_dim", head_dim) != head_dim:
            raise self.wrong("v_head_dim", f"differs from the keys' head_dim {head_dim}; this is not computed here")
        return head_dim

    def ties_embeddings(self) -> bool:
        tied = self.config.get("tie_word_embeddings", self.outer.get("tie_word_embeddings"))
        if tied is None:
            self.remarks.append("nothing is said about tie_word_embeddings: one table is counted for both ends")
        return tied is None or bool(tied)

    def bits(self, given: Bits) -> tuple[float, float]:
        """Return the bits of a weight and of a value in the KV cache."""
        if given.weight is None and (self.config.get("quantization_config") or self.outer.get("quantization_config")):
            raise self.wrong(
                "quantization_config",
                "is set, and what it makes of each weight is not computed here",
                "--weight-bits 8",
            )
        keys = ("dtype", "torch_dtype")
        found = [str(config[key]) for config in (self.config, self.outer) for key in keys if config.get(key)]
        dtype = found[0].removeprefix("torch.") if found else "bfloat16"
        if not found and None in (given.weight, given.kv):
            self.remarks.append("no dtype is given: 16 bits are assumed")
        if dtype not in DTYPE_BITS:
            raise self.wrong("dtype", f"{dtype!r} is not understood; known are {', '.join(DTYPE_BITS)}")
        weight_bits = given.weight or DTYPE_BITS[dtype]
        if weight_bits != 16:
            self.remarks.append(f"weights have {weight_bits:g} bits, the FLOP/s of devices are those of 16 (BF16)")
        return weight_bits, given.kv or DTYPE_BITS[dtype]

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; one with a default may be missing, null or 0."""
        value = self.config.get(key)
        if not value and default is not None:
            return default
        if value is None:
            raise self.wrong(key, "is missing", "configs are read that use the keys of Llama, Qwen, Mistral, Gemma")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, f"is {value!r}, not a positive integer")
        return value

    def wrong(self, key: str, what: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.source}: {key} {what}", hint)
