"""Tiny random-weight models that every suite may serve, and plain `generate` on them as the oracle for tokens."""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
EOS_TOKEN_ID = 2
PAD_TOKEN_ID = 3
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

GenerateGreedy = Callable[[Path, Sequence[int], int], list[int]]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Llama folder: grouped-query attention, tied embeddings, a byte-level tokenizer, a chat template."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        **_shared_settings(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return _save_model(config, tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Qwen3 folder: head_dim is not hidden_size / heads, queries and keys are normed, embeddings not tied."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        **_shared_settings(),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=False,
    )
    return _save_model(config, tmp_path_factory.mktemp("models") / "tiny-qwen")


@pytest.fixture(scope="session")
def generate_greedy() -> GenerateGreedy:
    """Return (folder, prompt, n) -> the n tokens that plain `generate` appends, end-of-sequence or not."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)

    @lru_cache(maxsize=8)
    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        # The mask is given because generate would otherwise guess one that hides every pad token of the prompt.
        output = load(folder).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
        return output[0, len(prompt) :].tolist()

    return generate


def _shared_settings() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 8192,
        "initializer_range": 0.3,  # large, so that attention is sharp and greedy output does not settle on one token
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "dtype": "float32",
    }


def _save_model(config: "PretrainedConfig", folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(20)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[PAD_TOKEN_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the embedded chat model, fetched and converted once into the user's cache."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "twinpool.engine.fetch", "smollm2"]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
