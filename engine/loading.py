"""Which engine a worker runs, from its spec; and the Hello that describes it."""

import json
import os
from pathlib import Path

from ..cluster.config import EngineSpec, Transport
from ..cluster.protocol.identity import Role
from ..cluster.protocol.messages import Hello
from .fake import FakeEngine
from .sequence import Engine

FAKE_NUM_BLOCKS = 256


def load(spec: EngineSpec, model_folder: Path, model_name: str) -> Engine:
    """Load the engine that `spec.kind` names. Raises UnsupportedModelError or ConfigError."""
    if spec.kind == "model":
        from .model import load_engine  # torch and transformers take seconds: only where they are needed

        return load_engine(model_folder, spec)
    vocab_size = int(json.loads((model_folder / "config.json").read_text())["vocab_size"])
    return FakeEngine(
        num_blocks=spec.num_blocks or FAKE_NUM_BLOCKS,
        block_size=spec.block_size or 16,
        vocab_size=vocab_size,
        max_model_len=spec.max_model_len or 4096,
        seconds_per_row=spec.fake_seconds_per_row,
        name=model_name,
    )


def hello(
    engine: Engine, spec: EngineSpec, role: Role, transport: Transport, data_addresses: tuple[str, ...] = ()
) -> Hello:
    return Hello(
        role=role,
        pid=os.getpid(),
        host=os.uname().nodename,
        identity=engine.identity,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        max_model_len=engine.max_model_len,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_num_seqs=spec.max_num_seqs,
        transport=transport,
        data_addresses=data_addresses,
    )
