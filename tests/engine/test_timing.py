"""Probes on an engine: what counts as cached is really written, and an engine that fails ends the probe only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from twinpool.cluster.protocol.messages import Failed, Message, PassesTimed, SampledToken, TimePasses
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.control import Control
from twinpool.engine.fake import FakeEngine
from twinpool.engine.probe import PassProbe
from twinpool.engine.sequence import LayerWritten, ScheduledRow
from twinpool.engine.timing import run_pass, write_kv


@dataclass(frozen=True)
class Limits:
    block_size: int = 4
    max_model_len: int = 60
    max_num_batched_tokens: int = 32
    max_num_seqs: int = 6


@dataclass
class RecordingControl:
    """The two things of a worker's control channel that a probe uses."""

    sent: list[Message] = field(default_factory=list[Message])
    num_moves: int = 0

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def moved(self) -> None:
        self.num_moves += 1


class BrokenEngine(FakeEngine):
    def step(self, rows: Sequence[ScheduledRow], on_layer: LayerWritten | None = None) -> list[SampledToken | None]:
        raise RuntimeError("out of memory")


def start(rows: tuple[tuple[int, int], ...]) -> tuple[PassProbe, BlockPool]:
    pool = BlockPool(8)
    probe = PassProbe(pool, Limits())
    assert probe.begin(TimePasses(probe_id="p", rows=rows, num_warmup=1, num_repeats=2, limit_s=9), True, 0.0) == []
    return probe, pool


def test_passes_run_to_their_answer_and_show_progress() -> None:
    engine, control = FakeEngine(num_blocks=8, block_size=4), RecordingControl()
    probe, pool = start(((5, 1), (0, 7)))
    num_passes = 0
    while probe.is_active:
        run_pass(probe, engine, cast(Control, control))
        num_passes += 1
    (answer,) = control.sent
    assert isinstance(answer, PassesTimed)
    assert (num_passes, len(answer.pass_s)) == (3, 2)
    assert min(answer.pass_s) > 0
    assert control.num_moves >= num_passes * engine.layout.num_layers
    assert pool.num_free == pool.num_blocks


def test_an_engine_that_fails_ends_the_probe_and_says_so() -> None:
    control = RecordingControl()
    probe, pool = start(((0, 7),))
    run_pass(probe, BrokenEngine(num_blocks=8, block_size=4), cast(Control, control))
    (failed,) = control.sent
    assert isinstance(failed, Failed)
    assert "RuntimeError" in failed.reason
    assert not failed.is_retryable
    assert not probe.is_active
    assert pool.num_free == pool.num_blocks


def test_every_layer_of_every_cached_token_is_written() -> None:
    engine, moves = FakeEngine(num_blocks=4, block_size=4), RecordingControl()
    layers, tokens = range(engine.layout.num_layers), range(10)
    ones = memoryview(bytearray(b"\1" * engine.layout.frame_bytes(len(layers), len(tokens))))
    engine.scatter([2, 0, 3], layers, tokens, ones)
    write_kv(engine, [2, 0, 3], 9, moves.moved)
    assert set(engine.gather([2, 0, 3], layers, range(9))) == {0}
    assert set(engine.gather([2, 0, 3], layers, range(9, 10))) == {1}, "and no other token"
    assert moves.num_moves == len(layers)
