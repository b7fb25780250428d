"""ModelEngine: a Hugging Face causal LM, unchanged, on our paged KV cache. Implements sequence.Engine.

A step packs its rows (batch.py), runs the model once with our attention (attention.py), and chooses tokens
(sampler.py). Knows no role, no scheduler and no transfer.
"""

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from ..cluster.config import EngineSpec
from ..cluster.protocol.errors import ConfigError, UnsupportedModelError
from ..cluster.protocol.messages import KVLayoutInfo, ModelIdentity, SampledToken
from ..kvtransfer.layout import DTYPE_BYTES, KVLayout
from .attention import ATTENTION_NAME, AttentionStep, CachedStep, ProbeStep, register_attention
from .batch import StepBatch, build_batch
from .fingerprint import model_fingerprint
from .grammar import GrammarError, Grammars, Mask
from .kv_cache import TORCH_DTYPES, KVCache, num_blocks_that_fit
from .sampler import SamplingRow, sample, score
from .sequence import LayerWritten, ScheduledRow, Sequence, StepOutput
from .support import check_calls, check_config

DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16}


@dataclass(frozen=True)
class ModelEngine:
    """One model with its cache; see sequence.Engine for the contract. Make one with `load_engine`."""

    model: nn.Module
    cache: KVCache
    identity: ModelIdentity
    max_model_len: int
    device: torch.device
    grammars: Grammars | None  # None: the folder has no tokenizer.json

    @property
    def layout(self) -> KVLayout:
        return self.cache.layout

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def vocab_size(self) -> int:
        """How many token ids the model has a row for."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    @torch.inference_mode()
    def step(self, rows: AnySequence[ScheduledRow], on_layer: LayerWritten | None = None) -> StepOutput:
        """Run one forward pass over `rows`."""
        sampled: list[SampledToken | None] = [None] * len(rows)
        if not rows:
            return StepOutput(sampled, [])
        batch = build_batch(rows, self.block_size, self.device)
        logits = _forward(self.model, batch, CachedStep(self.cache, batch.paged, on_layer))
        num_sampling, failures = len(batch.sampling_rows), dict[int, str]()
        sampling_rows = [self._sampling_row(i, rows[i], logits.shape[1], failures) for i in batch.sampling_rows]
        chosen = sample(logits[:num_sampling], sampling_rows)
        for i, token in zip(batch.sampling_rows, chosen, strict=True):
            sampled[i] = token
        return StepOutput(sampled, _scores(logits[num_sampling:], rows), failures)

    def _sampling_row(self, index: int, row: ScheduledRow, vocab_size: int, failures: dict[int, str]) -> SamplingRow:
        """Return what the sampler needs; where the grammar breaks, its reason goes to `failures`."""
        sequence, allowed = row.sequence, None
        history = sequence.token_ids if row.end == len(sequence.token_ids) else sequence.token_ids[: row.end]
        if sequence.sampling.grammar is not None:
            try:
                allowed = self._allowed(sequence, history[sequence.num_prompt_tokens :], vocab_size)
            except GrammarError as error:
                failures[index] = f"the grammar cannot go on: {error.message}"
        return SamplingRow(sequence.sampling, history, sequence.num_prompt_tokens, allowed)

    def _allowed(self, sequence: Sequence, output: AnySequence[int], vocab_size: int) -> Mask:
        assert sequence.sampling.grammar is not None
        if self.grammars is None:
            raise GrammarError("the model's folder has no tokenizer.json")
        if sequence.matcher is None:
            sequence.matcher = self.grammars.matcher(sequence.sampling.grammar)
        return sequence.matcher.allowed(output, sequence.sampling.stop_token_ids, vocab_size)

    def gather(self, block_table: AnySequence[int], layers: range, tokens: range) -> memoryview:
        return self.cache.gather(block_table, layers, tokens)

    def scatter(self, block_table: AnySequence[int], layers: range, tokens: range, payload: memoryview) -> None:
        self.cache.scatter(block_table, layers, tokens, payload)

    def poison(self, blocks: AnySequence[int]) -> None:
        self.cache.poison(blocks)


def _scores(logits: torch.Tensor, rows: AnySequence[ScheduledRow]) -> list[list[SampledToken]]:
    """Return the scores of each row's tokens, of which `logits` `[scored tokens, vocab]` hold one row a token."""
    scores: list[list[SampledToken]] = []
    for row in rows:
        scored = row.scored
        own, logits = logits[: len(scored)], logits[len(scored) :]
        token_ids = row.sequence.token_ids[scored.start : scored.stop]
        scores.append(score(own, token_ids, row.sequence.sampling.num_logprobs or 0) if scored else [])
    return scores


def _forward(model: nn.Module, batch: StepBatch, step: AttentionStep) -> torch.Tensor:
    """Return the logits `[sampling rows + scored tokens, vocab]` of one packed row."""
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        use_cache=False,
        logits_to_keep=batch.logits_to_keep,
        twinpool_step=step,
    )
    return output.logits[0]


def load_engine(model_folder: Path, spec: EngineSpec) -> ModelEngine:
    """Load the model in `model_folder` and make room for its KV cache.

    Sets torch's number of threads for this process. Raises UnsupportedModelError for a model that cannot be served
    exactly, ConfigError for a spec that does not fit it.
    """
    torch.set_num_threads(spec.num_threads)
    transformers_logging.disable_progress_bar()
    config = _read_config(model_folder)
    check_config(config)
    device = torch.device(_device(spec))
    dtype = _dtype(config, spec, device)
    layout = _layout(config, dtype)
    model = _load_model(model_folder, dtype).to(device)
    _probe(model, config, layout, device)
    block_size = spec.block_size or DEFAULT_BLOCK_SIZE[device.type]
    num_blocks = spec.num_blocks or num_blocks_that_fit(layout, block_size, spec.kv_cache_bytes)
    max_model_len = _max_model_len(config, spec, num_blocks * block_size)
    return ModelEngine(
        model=model,
        cache=KVCache(layout, num_blocks, block_size, device),
        identity=_identity(model_folder, layout),
        max_model_len=max_model_len,
        device=device,
        grammars=Grammars.load(model_folder) if (model_folder / "tokenizer.json").is_file() else None,
    )


def _read_config(model_folder: Path) -> Any:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model_folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"transformers cannot read the model in {model_folder}: {str(error).splitlines()[0]}",
            hint="check config.json; a model whose code lies beside its weights is not supported",
        ) from error
    return config.get_text_config(decoder=True)


def _device(spec: EngineSpec) -> str:
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU here", hint="device: auto, or cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if spec.device == "auto" else spec.device


def _dtype(config: Any, spec: EngineSpec, device: torch.device) -> str:
    """Return the spec's dtype, else the model's own; float32 on a CPU that would have to emulate that one."""
    if spec.dtype != "auto":
        return spec.dtype
    name = str(config.dtype or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedModelError(f"the model's dtype is {name!r}; supported are {sorted(DTYPE_BYTES)}")
    return name if device.type != "cpu" or name in native_cpu_dtypes() else "float32"


def native_cpu_dtypes() -> frozenset[str]:
    """Return the dtypes in which this CPU multiplies matrices; torch's emulation of others is ten times slower."""
    is_native = {
        "float32": True,
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(name for name, native in is_native.items() if native)


def _layout(config: Any, dtype: str) -> KVLayout:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return KVLayout(config.num_hidden_layers, num_kv_heads, head_dim, dtype)


def _load_model(model_folder: Path, dtype: str) -> nn.Module:
    register_attention()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=TORCH_DTYPES[dtype], attn_implementation=ATTENTION_NAME, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModelError(
            f"transformers cannot load the model in {model_folder} with our attention: {str(error).splitlines()[0]}"
        ) from error
    return model.eval()


@torch.inference_mode()
def _probe(model: nn.Module, config: Any, layout: KVLayout, device: torch.device) -> None:
    """Run two tokens through the model to see what its layers ask for. Raises UnsupportedModelError."""
    if getattr(model, "_is_stateful", False) or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise UnsupportedModelError(f"a model of type {config.model_type!r} keeps state that is not keys and values")
    step = ProbeStep()
    tokens = torch.arange(2, device=device)
    try:
        model(
            input_ids=tokens.unsqueeze(0),
            position_ids=tokens.unsqueeze(0),
            use_cache=False,
            logits_to_keep=tokens[:1],
            twinpool_step=step,
        )
    except (TypeError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} does not run on one packed row: {str(error).splitlines()[0]}"
        ) from error
    check_calls(config, step.calls, layout)


def _identity(model_folder: Path, layout: KVLayout) -> ModelIdentity:
    info = KVLayoutInfo(
        num_layers=layout.num_layers, num_kv_heads=layout.num_kv_heads, head_dim=layout.head_dim, dtype=layout.dtype
    )
    name = model_folder.resolve().name
    return ModelIdentity(model=name, fingerprint=model_fingerprint(model_folder), dtype=layout.dtype, layout=info)


def _max_model_len(config: Any, spec: EngineSpec, num_cache_tokens: int) -> int:
    """Return how long a sequence may become: bounded by the model, by the spec and by the cache."""
    if num_cache_tokens == 0:
        raise ConfigError(
            f"kv_cache_bytes {spec.kv_cache_bytes} does not hold one KV block of this model",
            hint="raise kv_cache_bytes, or set num_blocks",
        )
    of_model = getattr(config, "max_position_embeddings", None) or num_cache_tokens
    if spec.max_model_len is not None and spec.max_model_len > of_model:
        raise ConfigError(
            f"max_model_len {spec.max_model_len} is beyond the model's context of {of_model} tokens",
            hint=f"at most {of_model}",
        )
    if spec.max_model_len is not None and spec.max_model_len > num_cache_tokens:
        raise ConfigError(
            f"max_model_len {spec.max_model_len} is beyond the KV cache's {num_cache_tokens} tokens",
            hint="raise kv_cache_bytes or num_blocks, or lower max_model_len",
        )
    return spec.max_model_len or min(of_model, num_cache_tokens)
