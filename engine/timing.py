"""Runs probes on a real engine: the passes of a PassProbe in a worker's loop, and the KV that a probe presupposes."""

import logging
import time
from collections.abc import Callable, Sequence

from .control import Control
from .probe import PassProbe
from .sequence import Engine

log = logging.getLogger(__name__)


def run_pass(probe: PassProbe, engine: Engine, control: Control) -> None:
    """Run the next pass of `probe` and send what is to be said about it. A pass that raises ends the probe."""
    try:
        unwritten = probe.unwritten()
        if unwritten:
            for sequence, num_tokens in unwritten:
                write_kv(engine, sequence.block_table, num_tokens, control.moved)
            probe.written(time.monotonic())
        rows = probe.schedule()
        sampled = engine.step(rows, lambda _: control.moved()).sampled
    except Exception as error:
        log.exception("a timed pass failed")
        control.send(probe.failed(f"the pass failed: {type(error).__name__}"))
        return
    for answer in probe.completed(rows, sampled, time.monotonic()):
        control.send(answer)


def write_kv(engine: Engine, block_table: Sequence[int], num_tokens: int, moved: Callable[[], None]) -> None:
    """Fill the cache with zeros for the first `num_tokens` of a sequence.

    Memory that was never written is one page of zeros, whatever its size, which stays in the processor's cache when it
    is read: a served sequence's does not.
    """
    if num_tokens:
        layer_bytes = memoryview(bytearray(engine.layout.frame_bytes(1, num_tokens)))
        for layer in range(engine.layout.num_layers):
            engine.scatter(block_table, range(layer, layer + 1), range(num_tokens), layer_bytes)
            moved()
