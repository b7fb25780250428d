"""A sender thread and a receiver over real sockets: the tokens continue on the other side, or the transfer fails."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq
from completion_side import CompletionSide
from twinpool.cluster.protocol.messages import PrefillStages, SampledToken, SamplingParams
from twinpool.engine.fake import FAKE_LAYOUT, FakeEngine, expected_tokens
from twinpool.engine.sequence import ScheduledRow, Sequence as EngineSequence
from twinpool.kvtransfer.channel import SenderThread
from twinpool.kvtransfer.frames import Ack, Cancelled, Done, KVFrame
from twinpool.kvtransfer.sender import Closed, FirstOutput, Key, SenderLimits
from twinpool.kvtransfer.zmq_channel import ZmqSender

VOCAB = 2**31 - 1
MAX_FRAME_BYTES = 1 << 16
PROMPT = [7, 1, 250, 3, 3, 9, 0, 44, 81, 5, 2, 6, 19]
KEY: Key = ("r", 1)
ROW = FAKE_LAYOUT.frame_bytes(1, 1)
STAGES = PrefillStages(queue_s=0, prefill_s=1, num_computed_tokens=8, num_kv_bytes=9, num_kv_bytes_arrived=8)
OUTPUT = FirstOutput(0, SampledToken(token=42), STAGES)
Context = zmq.Context[zmq.Socket[bytes]]


class PromptSide:
    """A PROMPT worker's end: an engine, and the thread that sends."""

    def __init__(
        self,
        context: Context,
        addresses: Sequence[str],
        limits: SenderLimits,
        gather: Callable[[Sequence[int], range, range], memoryview] | None = None,
    ) -> None:
        self.engine = FakeEngine(8, 4, VOCAB)
        self.ended: queue.Queue[Closed] = queue.Queue()
        self.opened: list[str] = []

        def connect() -> ZmqSender:
            connection = ZmqSender(context, addresses, MAX_FRAME_BYTES, send_timeout_s=0.3)
            self.opened.append(connection.address)
            return connection

        self.thread = SenderThread(
            connect, FAKE_LAYOUT, limits, gather or self.engine.gather, self.ended.put, "completion-0"
        )

    def prefill(self, key: Key, prompt: list[int], table: list[int], generation: int, chunk: int = 5) -> int:
        """Compute `prompt` in chunks, announce its layers, finish with the first token; return that token."""
        sequence = EngineSequence(*key, list(prompt), len(prompt), SamplingParams(), block_table=table)
        self.thread.open(key, generation, 40 * ROW, 0, table)
        for start in range(0, len(prompt), chunk):
            end = min(len(prompt), start + chunk)
            announce = lambda layer, s=start, e=end: self.thread.layer_written(key, layer, range(s, e))  # noqa: E731
            (token,) = self.engine.step([ScheduledRow(sequence, start, end, end == len(prompt))], announce).sampled
        assert token is not None
        self.thread.finish(key, FirstOutput(0, token, STAGES))
        return token.token

    def next_end(self) -> Closed:
        return self.ended.get(timeout=10.0)


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not true within {within_s:g} s"
        time.sleep(0.002)


LIMITS = SenderLimits(max_frame_bytes=20 * ROW, min_frame_bytes=3 * ROW, lease_s=5.0)
Connect = Callable[..., PromptSide]


@pytest.fixture
def connect(context: Context, completion_side: CompletionSide) -> Iterator[Connect]:
    sides: list[PromptSide] = []

    def new(way: str = "", limits: SenderLimits = LIMITS, **more: object) -> PromptSide:
        addresses = [address for address in completion_side.channel.addresses if address.startswith(way)]
        sides.append(PromptSide(context, addresses, limits, **more))  # type: ignore[arg-type]
        return sides[-1]

    yield new
    for side in sides:
        side.thread.stop()


def continue_there(side: CompletionSide, key: Key, num_tokens: int) -> list[int]:
    """Decode on the receiving engine from the KV and the first token that came."""
    sequence = EngineSequence(*key, list(PROMPT), len(PROMPT), SamplingParams(), block_table=side.tables[key])
    sequence.token_ids.append(side.completed[key].token.token)
    sequence.num_computed_tokens = len(PROMPT)
    while sequence.num_output_tokens < num_tokens:
        (sampled,) = side.engine.step(
            [ScheduledRow(sequence, sequence.num_computed_tokens, len(sequence.token_ids), samples=True)]
        ).sampled
        assert sampled is not None
        sequence.num_computed_tokens = len(sequence.token_ids)
        sequence.token_ids.append(sampled.token)
    return sequence.token_ids[len(PROMPT) :]


@pytest.mark.parametrize("way", ["ipc", "tcp"])
@pytest.mark.parametrize("chunk", [3, 5, 100])
def test_the_tokens_continue_on_the_other_side(
    connect: Connect, completion_side: CompletionSide, way: str, chunk: int
) -> None:
    """From blocks of 4 to blocks of 5, in another order: the answer is that of one engine."""
    prompt_side = connect(way)
    completion_side.grant(KEY, 3, len(PROMPT), [9, 2, 7, 11])
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3, chunk)
    completion_side.work(KEY)
    assert prompt_side.next_end() == Closed(KEY, "acked", "")
    assert prompt_side.opened[0].startswith(way)
    assert continue_there(completion_side, KEY, 6) == expected_tokens(PROMPT, 6, VOCAB)
    assert completion_side.core.num_dropped_frames == 0


def test_ipc_is_taken_where_both_ways_are_open(connect: Connect, completion_side: CompletionSide) -> None:
    prompt_side = connect()
    completion_side.grant(KEY, 3, len(PROMPT), [9, 2, 7, 11])
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3)
    completion_side.work(KEY)
    assert prompt_side.opened == [completion_side.channel.addresses[0]]


def test_several_transfers_share_one_connection(connect: Connect, completion_side: CompletionSide) -> None:
    prompt_side = connect()
    keys: list[Key] = [("a", 1), ("b", 1)]
    for number, key in enumerate(keys):
        completion_side.grant(key, number + 1, len(PROMPT), [4 * number + i for i in range(3)])
        prompt_side.prefill(key, PROMPT, [4 * number + i for i in range(4)], number + 1)
    for key in keys:
        completion_side.work(key)
        assert continue_there(completion_side, key, 1) == expected_tokens(PROMPT, 1, VOCAB)
    assert {prompt_side.next_end().key for _ in keys} == set(keys)
    assert len(prompt_side.opened) == 1


def test_arrived_bytes_are_those_confirmed(connect: Connect, completion_side: CompletionSide) -> None:
    """Everything has arrived by the time that the transfer could complete; the count is read from another thread."""
    prompt_side = connect(limits=SenderLimits(100 * ROW, 1, 5.0))
    completion_side.grant(KEY, 3, 8, [0, 1])
    prompt_side.thread.open(KEY, 3, 1 << 20, 0, [0, 1])
    assert prompt_side.thread.num_arrived_bytes(KEY) == 0
    for layer in range(3):
        prompt_side.thread.layer_written(KEY, layer, range(8))
    while sum(m.num_bytes for m in completion_side.received if isinstance(m, KVFrame)) < 24 * ROW:
        completion_side.take_and_handle()
    prompt_side.thread.finish(KEY, OUTPUT)
    assert isinstance(completion_side.take_one().message, Done)  # taken, not answered: the transfer stays open
    wait_until(lambda: prompt_side.thread.num_arrived_bytes(KEY) == 24 * ROW)


def test_a_corrupted_payload_is_refused_and_the_transfer_ends(
    connect: Connect, completion_side: CompletionSide
) -> None:
    """Bytes that are damaged between checksum and copy: nothing is written, the sender is told why."""
    prompt_side = connect()
    completion_side.grant(KEY, 3, len(PROMPT), [9, 2, 7, 11])
    completion_side.damage_next_payload = True
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3)
    completion_side.work(KEY)
    assert completion_side.failed == {KEY: "the checksum is wrong"}
    assert prompt_side.next_end() == Closed(KEY, "cancelled", "the receiver refused: the checksum is wrong")
    assert not any(completion_side.engine.gather([9, 2, 7], range(3), range(len(PROMPT))))


def test_a_receiver_that_knows_nothing_of_the_transfer_ends_it(
    connect: Connect, completion_side: CompletionSide
) -> None:
    prompt_side = connect()
    completion_side.grant(KEY, 4, len(PROMPT), [9, 2, 7, 11])  # a newer generation than the sender's
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3)
    while not isinstance(completion_side.take_and_handle().message, Cancelled):
        pass
    ended = prompt_side.next_end()
    assert (ended.outcome, "old generation" in ended.reason) == ("cancelled", True)
    assert completion_side.core.is_open(KEY), "the newer transfer is untouched"


def test_an_abort_reaches_the_receiver(connect: Connect, completion_side: CompletionSide) -> None:
    prompt_side = connect()
    completion_side.grant(KEY, 3, 8, [0, 1])
    prompt_side.thread.open(KEY, 3, 1 << 20, 0, [0, 1])
    prompt_side.thread.abort(KEY, "the client left")
    completion_side.work(KEY)
    assert prompt_side.next_end() == Closed(KEY, "cancelled", "the client left")
    assert completion_side.released == [KEY]


def test_a_peer_that_never_credits_fails_the_transfer_by_its_lease(
    connect: Connect, completion_side: CompletionSide
) -> None:
    prompt_side = connect(limits=SenderLimits(10 * ROW, 1, lease_s=0.2))
    prompt_side.thread.open(KEY, 3, 12 * ROW, 0, [0, 1])
    for layer in range(3):
        prompt_side.thread.layer_written(KEY, layer, range(8))
    assert prompt_side.next_end() == Closed(KEY, "cancelled", "the receiver was silent for 0.2 s")
    assert isinstance(completion_side.take_one().message, KVFrame)
    assert isinstance(completion_side.take_one().message, Cancelled)


def test_a_peer_that_never_acks_fails_the_transfer_by_its_lease(
    connect: Connect, completion_side: CompletionSide
) -> None:
    prompt_side = connect(limits=SenderLimits(10 * ROW, 1, lease_s=0.2))
    prompt_side.thread.open(KEY, 3, 12 * ROW, 8, [0, 1])
    prompt_side.thread.finish(KEY, OUTPUT)
    assert prompt_side.next_end().outcome == "cancelled"
    assert isinstance(completion_side.take_one().message, Done)


def test_stop_fails_what_is_open_and_ends_the_thread_at_once(connect: Connect, completion_side: CompletionSide) -> None:
    """Regression: the thread waited once more, up to a lease, and the engine loop of the PROMPT worker with it."""
    prompt_side = connect(limits=SenderLimits(20 * ROW, 1, 60.0))
    before = threading.active_count()
    for name in "ab":
        prompt_side.thread.open((name, 1), 3, 1 << 20, 0, [0, 1])
    prompt_side.thread.finish(("a", 1), OUTPUT)
    assert isinstance(completion_side.take_one().message, Done)
    started_s = time.monotonic()
    prompt_side.thread.stop(wait_s=20.0)
    assert time.monotonic() - started_s < 5.0
    assert threading.active_count() == before - 1
    ended = sorted((prompt_side.ended.get_nowait() for _ in "ab"), key=lambda closed: closed.key)
    assert [(closed.key[0], closed.outcome) for closed in ended] == [("a", "failed"), ("b", "failed")]


def test_a_peer_that_takes_nothing_fails_the_transfer(context: Context, socket_folder: Path) -> None:
    """Its process is there and hangs: the queues fill, the send times out, the thread lives on."""
    (socket_folder / "hung").touch()
    prompt_side = PromptSide(context, [f"ipc://{socket_folder}/hung"], SenderLimits(ROW, 1, 60.0))
    prompt_side.thread.open(KEY, 3, 1 << 20, 0, list(range(8)))
    for start in range(0, 32, 4):
        for layer in range(3):
            prompt_side.thread.layer_written(KEY, layer, range(start, start + 4))
    assert prompt_side.next_end().outcome == "failed"
    prompt_side.thread.stop()


@pytest.mark.parametrize("addresses", [[], ["ipc:///nowhere/at/all"], ["tcp://no port"]])
def test_a_peer_without_an_address_fails_its_transfers(context: Context, addresses: list[str]) -> None:
    """Regression: the thread died before it had looked at a transfer, and none of them ever closed."""
    prompt_side = PromptSide(context, addresses, LIMITS)
    for name in "ab":
        prompt_side.thread.open((name, 1), 3, 1 << 20, 0, [0, 1])
        assert prompt_side.next_end().outcome == "failed"
    prompt_side.thread.stop()


def test_a_gather_that_raises_fails_the_transfer_and_not_the_thread(
    connect: Connect, completion_side: CompletionSide
) -> None:
    """Regression: the thread ended, and later transfers to that peer were never closed."""
    engine = FakeEngine(8, 4, VOCAB)
    outcomes = [RuntimeError("out of memory")]

    def gather(table: Sequence[int], layers: range, tokens: range) -> memoryview:
        if outcomes:
            raise outcomes.pop()
        return engine.gather(table, layers, tokens)

    prompt_side = connect(gather=gather)
    prompt_side.engine = engine
    prompt_side.prefill(KEY, PROMPT, [6, 1, 0, 3], 3)
    assert prompt_side.next_end().outcome == "failed"
    again: Key = ("r", 2)
    completion_side.grant(again, 4, len(PROMPT), [9, 2, 7, 11])
    prompt_side.prefill(again, PROMPT, [6, 1, 0, 3], 4)
    completion_side.work(again)
    assert prompt_side.next_end() == Closed(again, "acked", "")
    assert continue_there(completion_side, again, 3) == expected_tokens(PROMPT, 3, VOCAB)


def test_messages_in_a_row_are_answered_by_key(connect: Connect, completion_side: CompletionSide) -> None:
    """An ack for another request's key closes nothing."""
    prompt_side = connect()
    completion_side.grant(KEY, 3, 8, [0, 1])
    prompt_side.thread.open(KEY, 3, 1 << 20, 8, [0, 1])
    prompt_side.thread.finish(KEY, OUTPUT)
    received = completion_side.take_one()
    completion_side.channel.reply(received.peer, Ack(request_id="other", attempt=1, generation=3))
    completion_side.channel.reply(received.peer, Ack(request_id="r", attempt=2, generation=3))
    completion_side.channel.reply(received.peer, Ack(request_id="r", attempt=1, generation=3))
    assert prompt_side.next_end() == Closed(KEY, "acked", "")
    assert prompt_side.ended.empty()
