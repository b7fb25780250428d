"""The sender thread over a real socket: what it does when its peer, its cache or its owner lets it down."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import zmq
from channel_kinds import Channel
from completion_side import CompletionSide
from prompt_side import ROW, STAGES, VOCAB, Connect, PromptSide
from twinpool.cluster.protocol.messages import SampledToken
from twinpool.engine.fake import FakeEngine, expected_tokens
from twinpool.kvtransfer.channel import SenderEnd
from twinpool.kvtransfer.frames import Ack, Cancelled, Done, KVFrame
from twinpool.kvtransfer.sender import Closed, FirstOutput, Key, SenderLimits
from twinpool.kvtransfer.zmq_channel import ZmqSender

PROMPT = [7, 1, 250, 3, 3, 9, 0, 44, 81, 5, 2, 6, 19]
KEY: Key = ("r", 1)
OUTPUT = FirstOutput(0, SampledToken(token=42), STAGES)
Context = zmq.Context[zmq.Socket[bytes]]


def to(context: Context, addresses: Sequence[str]) -> Callable[[], SenderEnd]:
    return partial(ZmqSender, context, addresses, 1 << 16, send_timeout_s=0.3)


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not true within {within_s:g} s"
        time.sleep(0.002)


def test_ipc_is_taken_where_both_ways_are_open(context: Context, channel: Channel) -> None:
    with closing(ZmqSender(context, channel.receiver.addresses, 1 << 16, send_timeout_s=0.3)) as sender:
        assert sender.address == channel.receiver.addresses[0]
        assert sender.address.startswith("ipc://")


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
    prompt_side = PromptSide(to(context, [f"ipc://{socket_folder}/hung"]), SenderLimits(ROW, 1, 60.0))
    prompt_side.thread.open(KEY, 3, 1 << 20, 0, list(range(8)))
    for start in range(0, 32, 4):
        for layer in range(3):
            prompt_side.thread.layer_written(KEY, layer, range(start, start + 4))
    assert prompt_side.next_end().outcome == "failed"
    prompt_side.thread.stop()


@pytest.mark.parametrize("addresses", [[], ["ipc:///nowhere/at/all"], ["tcp://no port"]])
def test_a_peer_without_an_address_fails_its_transfers(context: Context, addresses: list[str]) -> None:
    """Regression: the thread died before it had looked at a transfer, and none of them ever closed."""
    prompt_side = PromptSide(to(context, addresses))
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
    assert completion_side.continue_there(again, PROMPT, 3) == expected_tokens(PROMPT, 3, VOCAB)


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
