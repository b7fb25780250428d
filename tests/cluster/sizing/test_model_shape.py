"""Reading configs: published parameter counts, the places a config is found in, and what is refused by its key."""

import json
from pathlib import Path
from typing import Any

import pytest
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.model_shape import (
    DEFAULT_MODEL_FOLDER,
    Bits,
    ModelShape,
    find_config,
    load_shape,
    parse_shape,
)
from twinpool.engine.fetch import SMOLLM2

Config = dict[str, Any]


def config_of(model_type: str, sizes: tuple[int, ...], **more: Any) -> Config:
    """Return a config in the keys most models share; `sizes` in the order below."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = {"model_type": model_type, "dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": False}
    return config | dict(zip((*keys, "num_key_value_heads"), sizes, strict=True)) | more


LLAMA_8B = config_of("llama", (128256, 4096, 14336, 32, 32, 8))
GEMMA_2B = config_of("gemma2", (256000, 2304, 9216, 26, 8, 4), head_dim=256, tie_word_embeddings=True)
GEMMA_2B |= {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096}
QWEN_MOE = config_of("qwen3_moe", (151936, 2048, 6144, 48, 32, 4), head_dim=128, moe_intermediate_size=768)
QWEN_MOE |= {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
# Published parameter counts, biases and norms included.
PUBLISHED = [
    (LLAMA_8B, 8_030_261_248),
    (config_of("llama", (128256, 8192, 28672, 80, 64, 8)), 70_553_706_496),
    (config_of("llama", (49152, 576, 1536, 30, 9, 3), tie_word_embeddings=True), 134_515_008),
    (config_of("mistral", (32000, 4096, 14336, 32, 32, 8)), 7_241_732_096),
    (config_of("qwen2", (152064, 3584, 18944, 28, 28, 4)), 7_615_616_512),
    (config_of("qwen3", (151936, 1024, 3072, 28, 16, 8), head_dim=128, tie_word_embeddings=True), 596_049_920),
    (GEMMA_2B, 2_614_341_888),
    (config_of("phi3", (32064, 3072, 8192, 32, 32, 32)), 3_821_079_552),
    (
        config_of("starcoder2", (49152, 3072, 12288, 30, 24, 2), hidden_act="gelu", tie_word_embeddings=True),
        3_030_371_328,
    ),
    (config_of("mixtral", (32000, 4096, 14336, 32, 32, 8), num_local_experts=8, num_experts_per_tok=2), 46_702_792_704),
    (QWEN_MOE, 30_532_122_624),
]


def shape_of(config: Config, **changes: Any) -> ModelShape:
    return parse_shape(config | changes, "the model", "config.json", Bits())


@pytest.mark.parametrize(
    ("config", "published"), PUBLISHED, ids=lambda value: value["model_type"] if isinstance(value, dict) else ""
)
def test_parameters_of_published_models(config: Config, published: int) -> None:
    """Matrices only: what is left out is below half a tenth of a percent."""
    assert shape_of(config).num_params == pytest.approx(published, rel=5e-4)


def test_the_sizes_of_a_shape() -> None:
    shape = shape_of(LLAMA_8B)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (32, 32, 8, 128)
    assert shape.attention_width == 4096
    assert shape.kv_bytes_per_token == 131_072
    assert shape.weights_bytes == 2 * shape.num_params
    assert shape.num_active_params == shape.num_params
    assert shape.remarks == ()


def test_an_explicit_head_dim_need_not_divide_the_width() -> None:
    shape = shape_of(GEMMA_2B)
    assert (shape.head_dim, shape.attention_width) == (256, 2048)
    assert shape.kv_bytes_per_token == 2 * 26 * 4 * 256 * 2


def test_without_grouped_queries_every_head_has_its_own_kv() -> None:
    assert shape_of(LLAMA_8B, num_key_value_heads=None).kv_bytes_per_token == 4 * 131_072


def test_active_parameters_of_experts() -> None:
    """Mixtral's 12.9 billion, Qwen3-30B-A3B's 3.3."""
    mixtral, qwen = shape_of(PUBLISHED[-2][0]), shape_of(QWEN_MOE)
    assert mixtral.num_active_params == pytest.approx(12.9e9, rel=0.005)
    assert qwen.num_active_params == pytest.approx(3.3e9, rel=0.02)
    assert mixtral.read_bytes(1) == pytest.approx(2 * mixtral.num_active_params)
    assert mixtral.read_bytes(1000) == pytest.approx(mixtral.weights_bytes)


def test_dense_layers_and_shared_experts_among_the_experts() -> None:
    """Each layer that is dense has one MLP in the place of all experts, their router and what they share."""
    every, width = shape_of(QWEN_MOE).num_params, 2048
    experts, dense = 128 * 3 * width * 768 + 128 * width, 3 * width * 6144
    assert every - shape_of(QWEN_MOE, first_k_dense_replace=3).num_params == 3 * (experts - dense)
    assert every - shape_of(QWEN_MOE, mlp_only_layers=[0, 47]).num_params == 2 * (experts - dense)
    assert every - shape_of(QWEN_MOE, decoder_sparse_step=2).num_params == 24 * (experts - dense)
    assert shape_of(QWEN_MOE, n_shared_experts=2).num_params - every == 48 * 2 * 3 * width * 768
    assert shape_of(QWEN_MOE, shared_expert_intermediate_size=100).num_params - every == 48 * 3 * width * 100


def test_the_language_model_of_a_composed_one() -> None:
    nested = {
        "model_type": "gemma3",
        "text_config": GEMMA_2B | {"dtype": None},
        "dtype": "float32",
        "vision_config": {},
    }
    shape = shape_of(nested)
    assert shape.num_params == shape_of(GEMMA_2B).num_params
    assert shape.bytes_per_param == 4
    assert "text_config" in shape.remarks[0]
    assert "32 bits" in shape.remarks[1]


def test_what_is_assumed_is_said() -> None:
    config = {key: value for key, value in GEMMA_2B.items() if key not in ("dtype", "tie_word_embeddings")}
    shape = shape_of(config)
    assert (shape.num_params, shape.bytes_per_param) == (shape_of(GEMMA_2B).num_params, 2)
    assert any("dtype" in remark for remark in shape.remarks)
    assert any("tie_word_embeddings" in remark for remark in shape.remarks)


def test_bits_of_ones_own_go_before_the_config() -> None:
    quantised = LLAMA_8B | {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(ConfigError, match=r"quantization_config(.|\n)*--weight-bits"):
        shape_of(quantised)
    shape = parse_shape(quantised, "the model", "config.json", Bits(weight=4.25, kv=8))
    assert (shape.bytes_per_param, shape.kv_bytes_per_token) == (4.25 / 8, 65_536)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("kv_lora_rank", 512, "MLA"),
        ("is_encoder_decoder", True, "encoder"),
        ("mamba_d_state", 16, "Mamba"),
        ("num_kv_shared_layers", 15, "share"),
        ("layer_types", ["full_attention", "linear_attention"], "linear_attention"),
        ("moe_num_experts", 64, "num_local_experts"),
        ("num_hidden_layers", None, "missing"),
        ("vocab_size", "many", "'many'"),
        ("hidden_size", -4096, "-4096"),
        ("num_attention_heads", True, "True"),
        ("num_key_value_heads", 5, "32"),
        ("v_head_dim", 64, "128"),
        ("hidden_size", 4100, "head_dim"),
        ("hidden_act", "relu2", "relu2"),
        ("dtype", "int3", "bfloat16"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_its_key(key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shape_of(LLAMA_8B, **{key: value})
    assert key in str(refused.value)
    assert says in str(refused.value)
    assert "config.json" in str(refused.value)


def test_a_folder_a_file_and_a_cached_hub_id_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA_8B))
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    places = (str(snapshot), str(snapshot / "config.json"), "some/model")
    assert len({load_shape(place).num_params for place in places}) == 1
    assert load_shape("some/model").name == "some/model"


def test_the_default_model_is_where_the_engine_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SMOLLM2.folder_name == DEFAULT_MODEL_FOLDER
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="not in the cache yet"):
        find_config("smollm2")
    folder = tmp_path / "models" / DEFAULT_MODEL_FOLDER
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert find_config("smollm2") == folder / "config.json"


@pytest.mark.parametrize(("text", "says"), [("{", "not JSON"), ("[]", "no JSON object"), (b"\xff", "not JSON")])
def test_a_file_that_is_no_config_is_refused(text: str | bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says):
        load_shape(str(path))


@pytest.mark.parametrize("model", ["no/such-model", "no such place", "/nowhere", ""])
def test_a_model_that_is_not_here_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched: a hub id counts only when its config is in the local cache."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        load_shape(model)
