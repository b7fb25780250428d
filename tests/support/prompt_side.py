"""A PROMPT worker's end of the data channel without the worker: an engine, and the thread that sends."""

import queue
from collections.abc import Callable, Sequence

from twinpool.cluster.protocol.messages import PrefillStages, SamplingParams
from twinpool.engine.fake import FAKE_LAYOUT, FakeEngine
from twinpool.engine.sequence import ScheduledRow, Sequence as EngineSequence
from twinpool.kvtransfer.channel import SenderEnd, SenderThread
from twinpool.kvtransfer.sender import Closed, FirstOutput, Key, SenderLimits

VOCAB = 2**31 - 1
ROW = FAKE_LAYOUT.frame_bytes(1, 1)
LIMITS = SenderLimits(max_frame_bytes=20 * ROW, min_frame_bytes=3 * ROW, lease_s=5.0)
STAGES = PrefillStages(queue_s=0, prefill_s=1, num_computed_tokens=8, num_kv_bytes=9, num_kv_bytes_arrived=8)


class PromptSide:
    def __init__(
        self,
        open_sender: Callable[[], SenderEnd],
        limits: SenderLimits = LIMITS,
        gather: Callable[[Sequence[int], range, range], memoryview] | None = None,
        engine: FakeEngine | None = None,
    ) -> None:
        self.engine = engine or FakeEngine(8, 4, VOCAB)
        self.ended: queue.Queue[Closed] = queue.Queue()
        self.num_opened = 0

        def connect() -> SenderEnd:
            connection = open_sender()
            self.num_opened += 1
            return connection

        self.thread = SenderThread(
            connect, FAKE_LAYOUT, limits, gather or self.engine.gather, self.ended.put, "completion-0"
        )

    def prefill(
        self,
        key: Key,
        prompt: list[int],
        table: list[int],
        generation: int,
        chunk: int = 5,
        credit_bytes: int = 40 * ROW,
    ) -> int:
        """Compute `prompt` in chunks, announce its layers, finish with the first token; return that token."""
        sequence = EngineSequence(*key, list(prompt), len(prompt), SamplingParams(), block_table=table)
        self.thread.open(key, generation, credit_bytes, 0, table)
        for start in range(0, len(prompt), chunk):
            end = min(len(prompt), start + chunk)
            announce = lambda layer, s=start, e=end: self.thread.layer_written(key, layer, range(s, e))  # noqa: E731
            (token,) = self.engine.step([ScheduledRow(sequence, start, end, end == len(prompt))], announce).sampled
        assert token is not None
        self.thread.finish(key, FirstOutput(0, token, STAGES))
        return token.token

    def next_end(self) -> Closed:
        return self.ended.get(timeout=10.0)


Connect = Callable[..., PromptSide]
