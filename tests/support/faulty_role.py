"""A worker with a fault planted inside: what a process of ours could do wrong, without product code for it.

    python faulty_role.py FAULT prefill_worker|decode_worker …the role's own flags

`LiveCluster.programs[name] = faulty_program(FAULT, name)` starts it in place of the plain module.
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence as AnySequence

from twinpool.cluster.protocol.messages import GrantRequest, Message, Prefill
from twinpool.cluster.role import run_role
from twinpool.engine.block_pool import BlockPool, Owner
from twinpool.engine.control import Control, Orphaned
from twinpool.engine.fake import FakeEngine
from twinpool.engine.sequence import LayerWritten, ScheduledRow, StepOutput

HANGS_ON = 259  # a prompt that begins with this token
HANG_S = 60.0
MODULES = {"prompt": "prefill_worker", "completion": "decode_worker"}


def faulty_program(fault: str, name: str) -> list[str]:
    """Return what python is to run as the worker `name`, with `fault` in it."""
    return [__file__, fault, MODULES[name.partition("-")[0]]]


def hang_in_a_step() -> None:
    """A step of such a prompt stands still, as a deadlock in a kernel would; sockets and heartbeats live on."""
    step = FakeEngine.step

    def hanging(self: FakeEngine, rows: AnySequence[ScheduledRow], on_layer: LayerWritten | None = None) -> StepOutput:
        if any(row.sequence.token_ids[0] == HANGS_ON for row in rows):
            time.sleep(HANG_S)
        return step(self, rows, on_layer)

    FakeEngine.step = hanging  # type: ignore[method-assign]


def hang_between_steps() -> None:
    """The loop stands still while it handles a message about such a prompt: the engine is idle, and nothing moves."""
    messages = Control.messages

    def hanging(self: Control) -> Iterator[Message | Orphaned]:
        for message in messages(self):
            if isinstance(message, GrantRequest | Prefill) and message.token_ids[:1] == (HANGS_ON,):
                time.sleep(HANG_S)
            yield message

    Control.messages = hanging  # type: ignore[method-assign]


def free_while_in_use() -> None:
    """A sequence's blocks are given back when it begins to decode, and it goes on reading them."""

    def promote(self: BlockPool, owner: Owner) -> None:
        self.release(owner)
        self.allocate(owner, 0, "sequence")

    BlockPool.promote = promote  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "hang in a step": hang_in_a_step,
    "hang between steps": hang_between_steps,
    "free while in use": free_while_in_use,
}


if __name__ == "__main__":
    _, fault, module, *flags = sys.argv
    FAULTS[fault]()
    sys.argv = [module, *flags]
    run_role(importlib.import_module(f"twinpool.{module}.__main__").main)
