"""ModelEngine against plain `generate`: the same tokens, however the work is cut into blocks, chunks and steps."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    T5Config,
)
from twinpool.cluster.config import EngineSpec
from twinpool.cluster.protocol.errors import ConfigError, UnsupportedModelError
from twinpool.cluster.protocol.messages import SampledToken, SamplingParams
from twinpool.engine.model import ModelEngine, load_engine
from twinpool.engine.sequence import ScheduledRow, Sequence, StepOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
UNLIMITED = 1 << 30
PROMPT_LENGTHS = (1, 2, 33, 150)
NUM_TOKENS = 24

GenerateGreedy = Callable[[Path, list[int], int], list[int]]
LoadEngine = Callable[..., ModelEngine]


@pytest.fixture(params=["tiny_llama", "tiny_qwen"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def load() -> LoadEngine:
    """Load an engine once for each (folder, block size); its cache is overwritten by every test."""

    @lru_cache(maxsize=32)
    def load_once(folder: Path, block_size: int = 16) -> ModelEngine:
        return load_engine(folder, EngineSpec(dtype="float32", device="cpu", block_size=block_size, num_blocks=2048))

    return load_once


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(4, 260, (length,), generator=generator).tolist()


def make_sequence(
    engine: ModelEngine, prompt: list[int], first_block: int, sampling: SamplingParams = GREEDY
) -> Sequence:
    """Give a sequence every second block, downwards, so that no two of its blocks follow each other."""
    num_blocks = -(-(len(prompt) + 64) // engine.block_size)
    table = [first_block + 2 * i for i in reversed(range(num_blocks))]
    return Sequence(f"r{first_block}", 1, list(prompt), len(prompt), sampling, block_table=table)


def make_sequences(engine: ModelEngine, prompts: list[list[int]]) -> list[Sequence]:
    """Give sequences blocks of one cache, two and two interleaved."""
    sequences: list[Sequence] = []
    first_block = 0
    for i in range(0, len(prompts), 2):
        pair = [make_sequence(engine, prompt, first_block + at) for at, prompt in enumerate(prompts[i : i + 2])]
        first_block += 2 * max(len(sequence.block_table) for sequence in pair)
        sequences += pair
    return sequences


def next_row(sequence: Sequence, chunk: int) -> ScheduledRow:
    start = sequence.num_computed_tokens
    end = min(start + chunk, len(sequence.token_ids))
    return ScheduledRow(sequence, start, end, samples=end == len(sequence.token_ids))


def advance(rows: list[ScheduledRow], tokens: list[SampledToken | None]) -> None:
    for row, token in zip(rows, tokens, strict=True):
        assert (token is not None) == row.samples
        row.sequence.num_computed_tokens = row.end
        if token is not None:
            row.sequence.token_ids.append(token.token)


def decode(engine: ModelEngine, sequences: list[Sequence], chunk: int, num_tokens: int) -> list[list[int]]:
    """Run all to `num_tokens` outputs each; one more joins every third step, so prefill and decode rows mix."""
    step = 0
    while any(s.num_output_tokens < num_tokens for s in sequences):
        joined = sequences[: 1 + step // 3]
        rows = [next_row(s, chunk) for s in joined if s.num_output_tokens < num_tokens]
        if rows:
            advance(rows, engine.step(rows).sampled)
        step += 1
    return [s.token_ids[s.num_prompt_tokens :] for s in sequences]


@pytest.mark.parametrize("chunk", [1, 5, 64, UNLIMITED])
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
def test_greedy_tokens_are_those_of_generate(
    folder: Path, block_size: int, chunk: int, load: LoadEngine, generate_greedy: GenerateGreedy
) -> None:
    """In float32, for every block size and chunk size, with prefill and decode rows in the same step (I4)."""
    engine = load(folder, block_size)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    found = decode(engine, make_sequences(engine, prompts), chunk, NUM_TOKENS)
    assert found == [generate_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("chunk", [300, UNLIMITED])
def test_a_long_prompt_gives_the_tokens_of_generate(
    folder: Path, chunk: int, load: LoadEngine, generate_greedy: GenerateGreedy
) -> None:
    """A prompt of many blocks of queries, whole and in chunks."""
    engine, prompt = load(folder), random_prompt(1500)
    assert decode(engine, [make_sequence(engine, prompt, 0)], chunk, 16) == [generate_greedy(folder, prompt, 16)]


def test_a_row_may_hold_several_tokens_after_a_prefix(
    folder: Path, load: LoadEngine, generate_greedy: GenerateGreedy
) -> None:
    """Tokens known in advance (drafts) run in one row beside plain decode rows, and change nothing."""
    engine, prompts = load(folder), [random_prompt(20), random_prompt(41)]
    expected = [generate_greedy(folder, prompt, 12) for prompt in prompts]
    drafted, plain = make_sequences(engine, prompts)
    decode(engine, [drafted, plain], UNLIMITED, 4)
    drafted.token_ids += expected[0][4:8]
    rows = [next_row(drafted, UNLIMITED), next_row(plain, UNLIMITED)]
    assert rows[0].end - rows[0].start == 5
    advance(rows, engine.step(rows).sampled)
    assert drafted.token_ids[20:] == expected[0][:9]
    assert plain.token_ids[41:] == expected[1][: plain.num_output_tokens]


@pytest.mark.parametrize(("block_size", "other_block_size"), [(16, 32), (32, 7)])
def test_a_sequence_continues_in_another_engine_from_its_gathered_rows(
    folder: Path, block_size: int, other_block_size: int, load: LoadEngine, generate_greedy: GenerateGreedy
) -> None:
    """Prefill here, move the rows layer by layer, decode there with another block size: the tokens of `generate`."""
    sender, receiver, prompt = load(folder, block_size), load(folder, other_block_size), random_prompt(90)
    source = make_sequence(sender, prompt, 3)
    target = make_sequence(receiver, prompt, 100)

    def move(layer: int) -> None:
        payload = sender.gather(source.block_table, range(layer, layer + 1), range(90))
        receiver.scatter(target.block_table, range(layer, layer + 1), range(90), payload)

    rows = [next_row(source, UNLIMITED)]
    advance(rows, sender.step(rows, on_layer=move).sampled)
    target.token_ids, target.num_computed_tokens = list(source.token_ids), 90
    assert decode(receiver, [target], UNLIMITED, NUM_TOKENS) == [generate_greedy(folder, prompt, NUM_TOKENS)]


def test_layers_are_reported_in_order_each_once_with_their_rows_written(folder: Path, load: LoadEngine) -> None:
    """What a sender gathers inside `on_layer` is what the cache holds after the step."""
    engine = load(folder)
    sequence = make_sequence(engine, random_prompt(40), 0)
    reported: list[tuple[int, bytes]] = []

    def on_layer(layer: int) -> None:
        reported.append((layer, bytes(engine.gather(sequence.block_table, range(layer, layer + 1), range(40)))))

    engine.step([ScheduledRow(sequence, 0, 40, samples=False)], on_layer)
    num_layers = engine.layout.num_layers
    assert [layer for layer, _ in reported] == list(range(num_layers))
    assert b"".join(rows for _, rows in reported) == bytes(
        engine.gather(sequence.block_table, range(num_layers), range(40))
    )


def test_a_step_changes_no_sequence_and_samples_only_where_asked(folder: Path, load: LoadEngine) -> None:
    """A step is told what to run; keeping the books is the scheduler's work. No rows, no tokens."""
    engine = load(folder)
    one, two = make_sequences(engine, [random_prompt(10), random_prompt(30)])
    before = (replace(one, token_ids=list(one.token_ids)), replace(two, token_ids=list(two.token_ids)))
    tokens = engine.step([ScheduledRow(one, 0, 5, samples=False), ScheduledRow(two, 0, 30, samples=True)]).sampled
    assert (one, two) == before
    assert tokens[0] is None
    assert tokens[1] is not None
    assert engine.step([ScheduledRow(one, 5, 9, samples=False)]) == StepOutput([None], [[]])
    assert engine.step([]) == StepOutput([], [])


def test_a_sampled_sequence_is_the_same_alone_and_beside_others(folder: Path, load: LoadEngine) -> None:
    """Same seed, same text, whoever shares the batch and however the prompt is cut."""
    engine = load(folder)
    sampling = SamplingParams(temperature=0.8, seed=7, top_p=0.95, max_tokens=64)
    alone = decode(engine, [make_sequence(engine, random_prompt(25), 0, sampling)], UNLIMITED, 40)
    others = [make_sequence(engine, random_prompt(30 + i), 200 * i + 100, SamplingParams(seed=i)) for i in range(7)]
    together = decode(engine, [make_sequence(engine, random_prompt(25), 0, sampling), *others], 10, 40)
    assert together[0] == alone[0]
    assert len({tuple(tokens) for tokens in together}) == 8


def test_a_resumed_sequence_samples_the_same_continuation(folder: Path, load: LoadEngine) -> None:
    """Output tokens prefilled again as part of the context leave positions, seeds and penalties as they were."""
    engine = load(folder)
    sampling = SamplingParams(temperature=0.9, seed=-3, frequency_penalty=0.5, repetition_penalty=1.2, max_tokens=64)
    whole = make_sequence(engine, random_prompt(12), 0, sampling)
    decode(engine, [whole], UNLIMITED, 30)
    resumed = make_sequence(engine, random_prompt(12), 300, sampling)
    resumed.token_ids = whole.token_ids[: 12 + 11]
    decode(engine, [resumed], UNLIMITED, 30)
    assert resumed.token_ids == whole.token_ids


def log_softmax_of_transformers(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Return `[tokens - 1, vocab]`: what plain transformers thinks of every token but the first."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("chunk", [1, 7, 64, UNLIMITED])
def test_scores_of_a_prompt_are_those_of_transformers(folder: Path, chunk: int, load: LoadEngine) -> None:
    """Whatever the chunks, beside a sequence that is not scored; outputs of an earlier attempt are not scored."""
    engine, prompt, outputs = load(folder), random_prompt(90), [5, 6, 7]
    sampling = SamplingParams(temperature=0.0, scores_prompt=True, num_logprobs=3)
    scored, other = make_sequences(engine, [prompt, random_prompt(41)])
    scored.sampling = sampling
    scored.token_ids += outputs
    scores: list[SampledToken] = []
    while scored.num_computed_tokens < len(prompt) + len(outputs):
        rows = [next_row(other, chunk), next_row(scored, chunk)]
        output = engine.step(rows)
        assert output.scores[0] == []
        scores += output.scores[1]
        advance(rows, output.sampled)
    expected = log_softmax_of_transformers(folder, prompt)
    assert [each.token for each in scores] == prompt[1:]
    found = torch.tensor([each.logprob for each in scores])
    assert torch.allclose(found, expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=1e-4)
    best = torch.tensor([[logprob for _, logprob in each.top] for each in scores])
    assert torch.allclose(best, expected.topk(3).values, atol=1e-4)
    named = torch.tensor([[token for token, _ in each.top] for each in scores])
    assert torch.allclose(expected.gather(1, named), best, atol=1e-4)


# --- What a layer may ask of the attention: window, softcap, sinks ----------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
OPTION_MODELS: dict[str, PretrainedConfig] = {
    "mistral with a window": MistralConfig(**SMALL, sliding_window=9),
    "gemma 2 with softcap, windows and its own scaling": Gemma2Config(
        **SMALL, sliding_window=11, attn_logit_softcapping=1.5, query_pre_attn_scalar=7
    ),
    "gpt-oss with sinks and windows": GptOssConfig(
        **SMALL,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}


def save_random(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("config", OPTION_MODELS.values(), ids=OPTION_MODELS.keys())
@pytest.mark.parametrize("chunk", [6, UNLIMITED])
def test_windows_softcaps_and_sinks_give_the_tokens_of_eager_attention(
    config: PretrainedConfig, chunk: int, tmp_path: Path
) -> None:
    """The oracle is transformers' own eager attention, recomputed without a cache at every token."""
    folder = save_random(config, tmp_path / "model")
    engine = load_engine(folder, EngineSpec(dtype="float32", device="cpu", block_size=4, num_blocks=64))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompt = random_prompt(37)
    expected = torch.tensor([prompt])
    for _ in range(16):
        with torch.inference_mode():
            logits = plain(expected, attention_mask=torch.ones_like(expected), use_cache=False).logits
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
    assert decode(engine, [make_sequence(engine, prompt, 0)], chunk, 16) == [expected[0, 37:].tolist()]


# --- What is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "encoder-decoder": (T5Config(vocab_size=260, d_model=32, num_layers=1), "encoder-decoder"),
    "MLA": (DeepseekV3Config(vocab_size=260, num_hidden_layers=1), "MLA"),
    "state space": (MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=1), "Mamba"),
    "dynamic RoPE": (
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "'dynamic' RoPE",
    ),
    "longrope": (
        Phi3Config(
            **{k: v for k, v in SMALL.items() if k != "head_dim"},
            original_max_position_embeddings=256,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
                "original_max_position_embeddings": 256,
            },
        ),
        "'longrope' RoPE",
    ),
}


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_cannot_be_served_exactly_is_refused_by_name(
    config: PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    """Before any weight is read: the folder holds only config.json."""
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load_engine(tmp_path, EngineSpec(device="cpu"))
    assert config.model_type in caught.value.message
    assert caught.value.hint


def test_layers_of_an_unknown_type_are_refused(tmp_path: Path, tiny_qwen: Path) -> None:
    config = json.loads((tiny_qwen / "config.json").read_text())
    config["layer_types"] = ["full_attention", "full_attention", "linear_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        load_engine(tmp_path, EngineSpec(device="cpu"))


def test_a_model_that_ignores_the_attention_interface_is_refused(tmp_path: Path) -> None:
    """Bloom computes its attention itself, with ALiBi: nothing would ever reach our cache."""
    config = AutoConfig.for_model("bloom", vocab_size=260, hidden_size=32, n_layer=1, n_head=2)
    save_random(config, tmp_path)
    with pytest.raises(UnsupportedModelError):
        load_engine(tmp_path, EngineSpec(device="cpu"))


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UnsupportedModelError, match="no-such-model"):
        load_engine(tmp_path, EngineSpec(device="cpu"))


# --- Identity and limits ----------------------------------------------------------------------------------------------


def test_the_layout_is_that_of_the_config(tiny_llama: Path, tiny_qwen: Path, load: LoadEngine) -> None:
    """head_dim is read, never computed from hidden_size and heads."""
    llama, qwen = load(tiny_llama).layout, load(tiny_qwen).layout
    assert (llama.num_layers, llama.num_kv_heads, llama.head_dim, llama.dtype) == (3, 2, 16, "float32")
    assert (qwen.num_layers, qwen.num_kv_heads, qwen.head_dim, qwen.dtype) == (4, 2, 24, "float32")
    assert load(tiny_llama).identity.layout.model_dump() == vars(llama)


@pytest.mark.parametrize(("native", "expected"), [({"float32", "bfloat16"}, "bfloat16"), ({"float32"}, "float32")])
def test_dtype_auto_is_one_that_the_cpu_has_instructions_for(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: set[str], expected: str
) -> None:
    """Regression: on a CPU without bfloat16 the default model prefilled at a tenth of the speed that float32 has."""
    folder = tmp_path / "lowered"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    monkeypatch.setattr("twinpool.engine.model.native_cpu_dtypes", lambda: frozenset(native))
    assert load_engine(folder, EngineSpec(device="cpu", num_blocks=4)).identity.dtype == expected
    asked = load_engine(folder, EngineSpec(device="cpu", num_blocks=4, dtype="bfloat16"))
    assert asked.identity.dtype == "bfloat16"


def test_dtype_auto_is_the_config_s(tiny_llama: Path) -> None:
    engine = load_engine(tiny_llama, EngineSpec(device="cpu", num_blocks=4))
    lowered = load_engine(tiny_llama, EngineSpec(device="cpu", num_blocks=4, dtype="bfloat16"))
    assert engine.identity.dtype == "float32"
    assert lowered.identity.dtype == lowered.layout.dtype == "bfloat16"
    assert next(lowered.model.parameters()).dtype == torch.bfloat16


@pytest.fixture
def copies(tiny_llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "two"):
        shutil.copytree(tiny_llama, tmp_path / name)
    return tmp_path / "one", tmp_path / "two"


def flip_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-(len(content) // 4) :] = bytes(len(content) // 4)
    path.write_bytes(bytes(content))


def change_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


@pytest.mark.parametrize("change", [flip_weights, change_config])
def test_the_fingerprint_tells_models_apart_and_copies_not(
    change: Callable[[Path], None], copies: tuple[Path, Path]
) -> None:
    """A copy in another folder is the same model; other weights or another config are not (I7)."""
    spec = EngineSpec(device="cpu", num_blocks=4)
    one, two = (load_engine(folder, spec).identity.fingerprint for folder in copies)
    change(copies[1])
    assert one == two != load_engine(copies[1], spec).identity.fingerprint


def test_poison_changes_what_reads_the_block_and_nothing_beside_it(tiny_llama: Path) -> None:
    """Blocks begun anew may hold poison behind their last row: masked, it weighs nothing."""
    engine = load_engine(tiny_llama, EngineSpec(device="cpu", num_blocks=64, block_size=16))
    engine.poison(range(64))
    prompts = [random_prompt(40), random_prompt(41)]
    clean = decode(engine, make_sequences(engine, prompts), UNLIMITED, 6)
    for poisons in (False, True):
        sequences = make_sequences(engine, prompts)
        decode(engine, sequences, UNLIMITED, 3)
        if poisons:
            engine.poison(sequences[0].block_table[:1])
        first, second = decode(engine, sequences, UNLIMITED, 6)
        assert (first != clean[0]) == poisons
        assert second == clean[1]


def test_the_cache_is_as_large_as_the_spec_says(tiny_llama: Path) -> None:
    engine = load_engine(tiny_llama, EngineSpec(device="cpu", kv_cache_bytes=1 << 20, block_size=16))
    assert sum(layer.nbytes for layer in engine.cache.layers) <= 1 << 20
    assert engine.num_blocks == (1 << 20) // (engine.layout.token_bytes * 16)
    assert engine.max_model_len == engine.num_blocks * 16  # a longer sequence could never be held


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_model_len": 9000}, "9000 is beyond the model's context of 8192"),
        ({"max_model_len": 100, "num_blocks": 3, "block_size": 32}, "100 is beyond the KV cache's 96"),
        ({"kv_cache_bytes": 4096}, "kv_cache_bytes 4096"),
    ],
)
def test_a_spec_that_does_not_fit_names_both_values(tiny_llama: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_engine(tiny_llama, EngineSpec(device="cpu", **setting))
    assert caught.value.hint
