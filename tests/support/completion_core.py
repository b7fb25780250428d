"""What tests of a COMPLETION worker's decisions ask it and send it."""

from typing import Any

from twinpool.cluster.protocol.messages import (
    GrantRequest,
    Message,
    PrefillStages,
    SampledToken,
    SamplingParams,
)
from twinpool.decode_worker.core import (
    CompletionCommand,
    CompletionCore,
    CompletionLimits,
    ToRouter,
)
from twinpool.kvtransfer.frames import Cancelled, Done, KVFrame, extend_digest
from twinpool.kvtransfer.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
KEY = ("r", 1)
STAGES = PrefillStages(queue_s=0, prefill_s=1, num_computed_tokens=8, num_kv_bytes=9, num_kv_bytes_arrived=8)


def new_core(**changes: Any) -> CompletionCore:
    fields: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 10,
        "max_model_len": 30,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "credit_bytes": 1000,
        "lease_s": 5.0,
    }
    return CompletionCore(CompletionLimits(**(fields | changes)), LAYOUT)


def request(name: str = "r", length: int = 6, attempt: int = 1, **changes: Any) -> GrantRequest:
    fields: dict[str, Any] = {
        "arrival_order": 1,
        "sampling": SamplingParams(max_tokens=4, stop_token_ids=(2,)),
        "token_ids": tuple(range(100, 100 + length)),
    }
    return GrantRequest(request_id=name, attempt=attempt, **(fields | changes))


def frame(name: str = "r", length: int = 6, generation: int = 1, **changes: Any) -> KVFrame:
    fields: dict[str, Any] = {
        "layout": LAYOUT.fingerprint,
        "sequence": 0,
        "layer_start": 0,
        "layer_end": 2,
        "token_start": 0,
        "token_end": length,
        "num_bytes": LAYOUT.frame_bytes(2, length),
        "checksum": 11,
    }
    return KVFrame(request_id=name, attempt=1, generation=generation, **(fields | changes))


def done(name: str = "r", generation: int = 1, position: int = 0, token: int = 50) -> Done:
    return Done(
        request_id=name,
        attempt=1,
        generation=generation,
        num_frames=1,
        digest=extend_digest(0, 11),
        position=position,
        token=SampledToken(token=token),
        stages=STAGES,
    )


def said(commands: list[CompletionCommand]) -> list[Message]:
    return [command.message for command in commands if isinstance(command, ToRouter)]


def give(core: CompletionCore, message: KVFrame | Done | Cancelled, now: float = 2.0) -> list[CompletionCommand]:
    num_bytes = message.num_bytes if isinstance(message, KVFrame) else 0
    commands = core.on_data(message, num_bytes, True, now)
    core.check()
    return commands


def start(core: CompletionCore, name: str = "r", length: int = 6, generation: int = 1, **changes: Any) -> None:
    """Bring a request to the running batch."""
    core.on_router(request(name, length, **changes), 1.0)
    give(core, frame(name, length, generation), 1.5)
    give(core, done(name, generation, changes.get("num_output_tokens", 0)), 2.0)


def step(core: CompletionCore, now: float = 3.0, token: int = 60) -> list[Message]:
    rows, commands = core.schedule()
    commands += core.completed(rows, [SampledToken(token=token)] * len(rows), now)
    core.check()
    return said(commands)
