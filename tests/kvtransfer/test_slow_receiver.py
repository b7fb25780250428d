"""A receiver that takes one frame at a time holds up itself alone; its sender keeps no more than it may (R13)."""

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zmq
from completion_side import CompletionSide
from frame_proxy import Faults, FrameProxy
from reports import report
from twinpool.cluster.protocol.messages import PrefillStages, SampledToken
from twinpool.engine.fake import FakeEngine
from twinpool.kvtransfer.channel import SenderThread
from twinpool.kvtransfer.layout import KVLayout
from twinpool.kvtransfer.receiver import Receiver
from twinpool.kvtransfer.sender import Closed, FirstOutput, Key, SenderLimits
from twinpool.kvtransfer.zmq_channel import ZmqReceiver, ZmqSender

LAYOUT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=1024, dtype="float32")
NUM_TOKENS = 512  # 16 MiB of KV
MAX_FRAME_BYTES = 512 << 10
CREDIT_BYTES = 8 << 20  # more than what the kernel takes off the sender's hands
LIMITS = SenderLimits(MAX_FRAME_BYTES, min_frame_bytes=1, lease_s=30.0)
STAGES = PrefillStages(queue_s=0, prefill_s=0, num_computed_tokens=0, num_kv_bytes=0, num_kv_bytes_arrived=0)
OUTPUT = FirstOutput(0, SampledToken(token=1), STAGES)
Context = zmq.Context[zmq.Socket[bytes]]


class Sink(FakeEngine):
    """Keeps nothing: only what the sender keeps is looked at."""

    def scatter(self, *_: object) -> None:
        """Forget the rows."""


class Receiving:
    """A COMPLETION worker's end with a thread of its own, which takes whatever comes."""

    def __init__(self, context: Context, path: Path) -> None:
        channel = ZmqReceiver(context, path, MAX_FRAME_BYTES)
        self._side = CompletionSide(channel, Sink(1, 1), Receiver(LAYOUT, lease_s=30.0))
        self.tcp_address = channel.addresses[1]
        self._is_ending = False
        self._thread = threading.Thread(target=self._run)

    def grant_all(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._side.grant(key, 1, NUM_TOKENS, [0])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_ending = True
        self._thread.join(10)
        self._side.channel.close()

    def _run(self) -> None:
        while not self._is_ending:
            if self._side.channel.socket.poll(20):
                self._side.take_and_handle()


class Sending:
    """A sender thread whose payloads are counted as long as anybody, ZMQ included, holds them."""

    def __init__(self, context: Context, address: str) -> None:
        self.num_held_bytes = self.max_held_bytes = 0
        self._lock = threading.Lock()
        self._closed: dict[Key, Closed] = {}
        self._changed = threading.Event()
        connect = lambda: ZmqSender(context, [address], MAX_FRAME_BYTES, send_timeout_s=30.0)  # noqa: E731
        self.thread = SenderThread(connect, LAYOUT, LIMITS, self._gather, self._on_closed, "completion-0")

    def begin(self, keys: Sequence[Key]) -> None:
        """Everything is computed at once: from now on only credits hold the transfers back."""
        for key in keys:
            self.thread.open(key, 1, CREDIT_BYTES, 0, [0])
            for layer in range(LAYOUT.num_layers):
                self.thread.layer_written(key, layer, range(NUM_TOKENS))
            self.thread.finish(key, OUTPUT)

    def seconds_of(self, key: Key) -> float:
        """Send one transfer and return how long it took until its Ack."""
        began_s = time.monotonic()
        self.begin([key])
        while key not in self._closed:
            assert self._changed.wait(30), "the transfer does not end"
            self._changed.clear()
        assert self._closed[key].outcome == "acked"
        return time.monotonic() - began_s

    def _gather(self, _: Sequence[int], layers: range, tokens: range) -> memoryview:
        rows = np.zeros(LAYOUT.frame_bytes(len(layers), len(tokens)), dtype=np.uint8)
        self._count(rows.nbytes)
        weakref.finalize(rows, self._count, -rows.nbytes)
        return rows.data

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_held_bytes += num_bytes
            self.max_held_bytes = max(self.max_held_bytes, self.num_held_bytes)

    def _on_closed(self, closed: Closed) -> None:
        self._closed[closed.key] = closed
        self._changed.set()


@pytest.fixture
def receiving(context: Context, socket_folder: Path) -> Iterator[list[Receiving]]:
    sides = [Receiving(context, socket_folder / f"kv{i}") for i in range(2)]
    yield sides
    for side in sides:
        side.close()


def p95(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.95))


@pytest.mark.parametrize("num_transfers", [1, 20])
def test_a_slow_receiver_bounds_its_sender_and_holds_up_no_other(
    context: Context, receiving: list[Receiving], num_transfers: int
) -> None:
    """R13: the payloads that the sender holds never exceed its credits by 10 %; transfers to others take no longer."""
    slow, fast = receiving
    to_slow = [(f"slow-{i}", 1) for i in range(num_transfers)]
    alone, beside = ([(f"{name}-{i}", 1) for i in range(10)] for name in ("alone", "beside"))
    slow.grant_all(to_slow)
    fast.grant_all([*alone, *beside])
    for side in receiving:
        side.start()
    proxy = FrameProxy(int(slow.tcp_address.rpartition(":")[2]))
    proxy.to_target.faults = Faults(messages_per_s=1)
    sending_slowly, sending = Sending(context, proxy.address), Sending(context, fast.tcp_address)
    alone_s = [sending.seconds_of(key) for key in alone]
    sending_slowly.begin(to_slow)
    window = num_transfers * CREDIT_BYTES
    deadline_s = time.monotonic() + 20
    while sending_slowly.max_held_bytes < CREDIT_BYTES / 2 or proxy.to_target.counts["passed"] < 2:
        assert time.monotonic() < deadline_s, "its credits are not used"
        time.sleep(0.05)
    beside_s = [sending.seconds_of(key) for key in beside]
    held = sending_slowly.max_held_bytes / window
    report(f"R13: held {held:.2f} windows, p95 {p95(alone_s):.3f} s alone, {p95(beside_s):.3f} s beside")
    assert sending_slowly.num_held_bytes > 0, "it was not slow"
    assert held <= 1.1
    assert p95(beside_s) <= 1.2 * p95(alone_s) + 0.5, "a wait for the slow one would be seconds"
    proxy.to_target.faults = Faults()  # its sender may be in the middle of a send, which it ends first
    sending_slowly.thread.stop(10)
    sending.thread.stop(10)
    proxy.close()
