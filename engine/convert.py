"""Turn a Llama-architecture GGUF file into a Hugging Face folder: bf16 safetensors, config and tokenizer.

Runs once per model, long before any request (see fetch.py). Reads the file with the `gguf` package and knows nothing
of where it came from. Only what the embedded model needs is supported: architecture `llama`, a byte-level BPE
tokenizer that splits digits one by one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..cluster.protocol.errors import UnsupportedModelError

CONTROL_TOKEN = 3  # in `tokenizer.ggml.token_type`

_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class _Metadata:
    """The key-value section of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise UnsupportedModelError(f"the GGUF file has no {key!r}, which its conversion needs")
        return self._fields[key].contents()

    def require(self, key: str, expected: str) -> None:
        if self[key] != expected:
            raise UnsupportedModelError(f"the GGUF file's {key} is {self[key]!r}; only {expected!r} can be converted")


def convert_gguf(gguf_file: Path, folder: Path, on_progress: Callable[[int, int], None]) -> None:
    """Write `folder` (which exists) from `gguf_file`; `on_progress(done, total)` counts tensors.

    Raises UnsupportedModelError for another architecture or tokenizer.
    """
    reader = GGUFReader(gguf_file)
    metadata = _Metadata(reader)
    metadata.require("general.architecture", "llama")
    metadata.require("tokenizer.ggml.model", "gpt2")
    metadata.require("tokenizer.ggml.pre", "smollm")
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    save_file(_weights(reader, metadata, on_progress), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(metadata, is_tied))
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))


def _weights(
    reader: GGUFReader, metadata: _Metadata, on_progress: Callable[[int, int], None]
) -> dict[str, torch.Tensor]:
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = _halves_rope_order(values, heads[kind])
        weights[_hugging_face_name(tensor.name)] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
        on_progress(done, len(reader.tensors))
    return weights


def _hugging_face_name(name: str) -> str:
    *block, kind, suffix = name.split(".")
    if kind not in _TENSOR_NAMES:
        raise UnsupportedModelError(f"the GGUF file holds a tensor {name!r} that a Llama model does not have")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_TENSOR_NAMES[kind]}.{suffix}"


def _halves_rope_order(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder a query or key matrix: GGUF interleaves the two halves that Hugging Face's RoPE rotates apart."""
    num_rows, num_columns = values.shape
    pairs = values.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def _config(metadata: _Metadata, is_tied: bool) -> dict[str, Any]:
    num_heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // num_heads,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_theta": metadata["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "dtype": "bfloat16",
        **_generation_config(metadata),
    }


def _generation_config(metadata: _Metadata) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: metadata[f"tokenizer.ggml.{key}_token_id"] for name, key in names.items()}


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _control(metadata)])
    return tokenizer


def _control(metadata: _Metadata) -> list[str]:
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    return [t for t, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=True) if kind == CONTROL_TOKEN]


def _tokenizer_config(metadata: _Metadata) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        **{name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
