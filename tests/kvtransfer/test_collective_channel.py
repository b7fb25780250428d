"""The channel over communicators, beyond what all channels owe: their lives, and libraries that do not let go."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from channel_kinds import not_stuck
from twinpool.cluster.config import LivenessSpec, TransferSpec
from twinpool.cluster.launch.restarts import FINAL_CODES, describe_exit
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.kvtransfer.channel import ReceiverEnd, SenderEnd
from twinpool.kvtransfer.collective_channel import CollectiveReceiver, CollectiveSender
from twinpool.kvtransfer.communicator import Broken, Communicator, CommunicatorSettings, Report
from twinpool.kvtransfer.frames import (
    ANNOUNCING_FROM_RECEIVER,
    ANNOUNCING_FROM_SENDER,
    Announce,
    Cancelled,
    KVFrame,
    Received,
    checksum,
)
from twinpool.kvtransfer.open_channel import ChannelOpener
from twinpool.kvtransfer.process_groups import GlooGroup
from twinpool.kvtransfer.staging import StagingLimits
from twinpool.kvtransfer.zmq_channel import ZmqReceiver, ZmqSender

MAX_FRAME_BYTES = 1 << 20
Context = zmq.Context[zmq.Socket[bytes]]


def kv_frame(number: int, payload: bytes) -> KVFrame:
    return KVFrame(
        request_id="r",
        attempt=1,
        generation=3,
        layout=1,
        sequence=number,
        layer_start=0,
        layer_end=1,
        token_start=0,
        token_end=1,
        num_bytes=len(payload),
        checksum=checksum(payload),
    )


class Bench:
    """One receiver and the senders to it, all turned by the test's thread."""

    def __init__(self, context: Context, folder: Path, wait_s: float = 5.0, **limits: Any) -> None:
        self.folder, self.context = folder, context
        self.settings = CommunicatorSettings(
            way="gloo",
            make_group=lambda rank: GlooGroup(rank, "127.0.0.1"),
            build_s=5.0,
            wait_s=wait_s,
            free_s=10.0,
            on_stuck=not_stuck,
        )
        staging: dict[str, Any] = {"max_communicators": 4, "idle_s": 60.0, "max_staged_bytes": 4 << 20, **limits}
        self.receiver = CollectiveReceiver(
            ZmqReceiver(context, folder / "kv", MAX_FRAME_BYTES, kinds=ANNOUNCING_FROM_SENDER),
            (),
            self.settings,
            StagingLimits(max_frame_bytes=MAX_FRAME_BYTES, wait_s=wait_s, build_s=5.0, **staging),
        )
        self.senders: list[CollectiveSender] = []

    def connect(self) -> CollectiveSender:
        socket = ZmqSender(self.context, self.receiver.addresses, MAX_FRAME_BYTES, 5.0, kinds=ANNOUNCING_FROM_RECEIVER)
        self.senders.append(CollectiveSender(socket, self.settings, 4 << 20, lambda: None))
        return self.senders[-1]

    def send(self, sender: SenderEnd, number: int, size: int = 1000) -> bytes:
        payload = bytes([number]) * size
        sender.send(kv_frame(number, payload), memoryview(payload))
        return payload

    def next_received(self, turned: Sequence[CollectiveSender] | None = None, within_s: float = 15.0) -> Received:
        deadline_s = time.monotonic() + within_s
        while (received := self.receiver.receive()) is None:
            assert time.monotonic() < deadline_s, "nothing came"
            self.turn(turned)
        return received

    def turn(self, turned: Sequence[CollectiveSender] | None = None) -> None:
        for sender in self.senders if turned is None else turned:
            sender.receive()
        time.sleep(0.005)

    def num_threads(self, of: str) -> int:
        return sum(thread.name.startswith(of) for thread in threading.enumerate())

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + 15
        while not condition():
            assert time.monotonic() < deadline_s, what
            self.turn()

    def close(self) -> None:
        self.receiver.close()
        for sender in self.senders:
            sender.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def bench(context: Context, socket_folder: Path, stack: ExitStack) -> Callable[..., Bench]:
    return lambda **limits: stack.enter_context(closing(Bench(context, socket_folder, **limits)))


def test_the_payload_goes_through_the_communicator_and_not_through_zmq(bench: Callable[..., Bench]) -> None:
    both = bench()
    sender = both.connect()
    payload = both.send(sender, 1)
    received = both.next_received()
    assert isinstance(received.message, Announce), "a frame that was announced"
    assert (bytes(received.payload), received.is_intact) == (payload, True)
    assert both.num_threads("communicator-1") == 2, "both ends of one"


def test_communicators_are_few_and_each_peer_gets_its_turn(bench: Callable[..., Bench]) -> None:
    """Five peers and two places: whoever is out of use makes place, and every frame arrives."""
    both = bench(max_communicators=2)
    for number in range(5):
        both.send(both.connect(), number)
    for number, sender in enumerate(both.senders):
        both.send(sender, number + 5)
    received = [both.next_received() for _ in range(10)]
    assert all(each.is_intact for each in received)
    assert sorted(each.message.sequence for each in received if isinstance(each.message, Announce)) == list(range(10))
    both.wait_until(lambda: both.num_threads("communicator-") <= 4, "two ends of two communicators")


def test_an_unused_communicator_ends_at_both_sides_and_the_next_frame_gets_a_new_one(
    bench: Callable[..., Bench],
) -> None:
    both = bench(idle_s=0.3)
    sender = both.connect()
    for number in range(2):
        both.send(sender, number)
        assert both.next_received().is_intact
        both.wait_until(lambda: both.num_threads("communicator-") == 0, "the communicator was left")


def test_a_sender_that_hangs_is_not_waited_for(bench: Callable[..., Bench]) -> None:
    """Told to go, it sends nothing: its frames go on without bytes, and what another one sends is not held up."""
    both = bench(wait_s=1.0)
    hangs, works = both.connect(), both.connect()
    both.send(hangs, 1)
    assert both.next_received().is_intact
    for number in (2, 3):
        both.send(hangs, number)
    hangs.send(Cancelled(request_id="c", attempt=1, generation=3))
    both.send(works, 4)
    received = [both.next_received(turned=[works]) for _ in range(4)]
    of_hung = [each for each in received if not (isinstance(each.message, Announce) and each.message.sequence == 4)]
    assert [each.is_intact for each in received if each not in of_hung] == [True]
    assert [type(each.message) for each in of_hung] == [Announce, Announce, Cancelled]
    assert [(each.payload.nbytes, each.is_intact) for each in of_hung] == [(0, False)] * 3


def test_a_wait_for_a_payload_ends_when_the_channel_is_closed(context: Context, socket_folder: Path) -> None:
    """Gloo's own abort wakes nobody; here closing would take 60 s."""
    both = Bench(context, socket_folder, wait_s=60.0)
    hangs = both.connect()
    both.send(hangs, 1)
    assert both.next_received().is_intact
    both.send(hangs, 2)
    socket = hangs.sources[0]
    assert isinstance(socket, zmq.Socket)
    assert socket.poll(10_000), "told to go"
    time.sleep(0.3)  # so that the wait has begun, which nothing tells; without one the test shows nothing, and passes
    started_s = time.monotonic()
    both.receiver.close()
    assert time.monotonic() - started_s < 9.0
    hangs.close()


def test_a_peer_that_sends_by_zmq_alone_is_served_as_well(bench: Callable[..., Bench]) -> None:
    both = bench()
    with closing(ZmqSender(both.context, both.receiver.addresses, MAX_FRAME_BYTES, 5.0)) as sender:
        payload = both.send(sender, 1)
        received = both.next_received()
    assert (type(received.message), bytes(received.payload), received.is_intact) == (KVFrame, payload, True)


def test_who_asks_for_no_payload_is_given_up(context: Context, socket_folder: Path) -> None:
    """The outbox is bounded. A receiver that never says Go fails the connection, and with it goes what is in there."""
    settings = CommunicatorSettings("gloo", lambda rank: GlooGroup(rank, "127.0.0.1"), 5.0, 0.3, 10.0, not_stuck)
    with closing(ZmqReceiver(context, socket_folder / "kv", MAX_FRAME_BYTES, kinds=ANNOUNCING_FROM_SENDER)) as mute:
        socket = ZmqSender(context, mute.addresses, MAX_FRAME_BYTES, 5.0, kinds=ANNOUNCING_FROM_RECEIVER)
        with closing(CollectiveSender(socket, settings, 2500, lambda: None)) as sender:
            for number in range(2):
                sender.send(kv_frame(number, bytes(1000)), bytes(1000))
            with pytest.raises(ConnectionError, match="asks for no payload"):
                sender.send(kv_frame(2, bytes(1000)), bytes(1000))


class Hanging:
    """A library that never comes back: from its work, or from its abort."""

    def __init__(self, where: str) -> None:
        self.where, self.freed = where, threading.Event()

    def _hang(self, here: str) -> None:
        if here == self.where:
            self.freed.wait(60)

    def connect(self, store: object, timeout_s: float) -> None:
        self._hang("connect")

    def post(self, num_bytes: int) -> None:
        self._hang("post")

    def take(self, timeout_s: float) -> memoryview:
        self._hang("take")
        return memoryview(b"")

    def send(self, payload: memoryview, timeout_s: float) -> None:
        self._hang("send")

    def abort(self) -> None:
        self._hang("abort")


@pytest.mark.parametrize("where", ["connect", "post", "send", "none"])
def test_a_communicator_that_does_not_let_go_is_told_as_stuck(where: str) -> None:
    """Leaving it never waits; whoever owns the process hears of it."""
    group, stuck, reports = Hanging(where), list[str](), list[Report]()
    settings = CommunicatorSettings("nccl", lambda _: group, 1.0, 1.0, 0.3, stuck.append)
    communicator = Communicator(7, 0, settings, reports.append)
    communicator.post(Announce(**kv_frame(0, b"x").model_dump()))
    if where == "send":
        communicator.send(memoryview(b"x"))
    started_s = time.monotonic()
    communicator.leave()
    communicator.leave()
    assert time.monotonic() - started_s < 0.3
    is_freed = communicator.is_freed(wait_s=10.0)
    group.freed.set()
    assert is_freed == (where == "none")
    assert stuck == ([] if is_freed else ["communicator 7 cannot be freed within 0.3 s"])
    assert not [report for report in reports if isinstance(report, Broken)]


def test_an_abort_that_hangs_does_not_hold_up_who_left() -> None:
    """Case 40: the abort itself hangs. Leaving does not wait for it, and the process is told."""
    group, stuck = Hanging("abort"), list[str]()
    communicator = Communicator(7, 0, CommunicatorSettings("nccl", lambda _: group, 1, 1, 0.3, stuck.append), print)
    communicator.leave()
    assert not communicator.is_freed()
    communicator.is_freed(wait_s=10.0)
    group.freed.set()
    assert stuck == ["communicator 7 cannot be freed within 0.3 s"]


def test_a_stuck_process_ends_with_a_code_after_which_it_is_started_again() -> None:
    code = (
        "from twinpool.cluster.role import end_stuck_process; import logging, threading; logging.basicConfig();"
        "threading.Thread(target=end_stuck_process, args=('communicator 7 hangs',)).start(); threading.Event().wait(30)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert describe_exit(ended.returncode) == "exited with code 5: a communicator for KV hung"
    assert ended.returncode not in FINAL_CODES
    assert "communicator 7 hangs: this process ends itself" in ended.stderr


class TestOpener:
    """What ChannelOpener makes of the spec."""

    def opener(self, **transfer: Any) -> ChannelOpener:
        return ChannelOpener(TransferSpec.model_validate(transfer), LivenessSpec(), "cpu", not_stuck)

    def receiver(self, opener: ChannelOpener, context: Context, folder: Path) -> ReceiverEnd:
        return opener.open_receiver(partial(ZmqReceiver, context, folder / "kv", MAX_FRAME_BYTES))

    def sender(self, opener: ChannelOpener, context: Context, addresses: Sequence[str]) -> SenderEnd:
        return opener.open_sender(partial(ZmqSender, context, addresses, MAX_FRAME_BYTES, 5.0), addresses, "peer")

    def test_auto_without_a_gpu_is_zmq_alone(
        self, context: Context, socket_folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        with closing(self.receiver(self.opener(), context, socket_folder)) as receiver:
            assert isinstance(receiver, ZmqReceiver)
            with closing(self.sender(self.opener(), context, receiver.addresses)) as sender:
                assert isinstance(sender, ZmqSender)
        assert caplog.messages == ["KV to peer goes by zmq (auto: this worker has no GPU with NCCL)"]

    def test_gloo_listens_where_the_data_socket_does_and_nowhere_else(
        self, context: Context, socket_folder: Path
    ) -> None:
        opener = self.opener(transport="gloo")
        before = listening_addresses()
        with closing(self.receiver(opener, context, socket_folder)) as receiver:
            assert receiver.addresses[2:] == ("gloo://127.0.0.1",)
            with closing(self.sender(opener, context, receiver.addresses)) as sender:
                sender.send(kv_frame(1, b"x"), b"x")
                deadline_s = time.monotonic() + 15
                while (received := receiver.receive()) is None:
                    assert time.monotonic() < deadline_s
                    sender.receive()
                    time.sleep(0.005)
                assert received.is_intact, "else nothing was connected"
                added = listening_addresses() - before
        assert added, "ZMQ's own, at least"
        assert {address.rpartition(":")[0] for address in added} == {"0100007F"}, "127.0.0.1"

    def test_more_pairs_than_places_go_by_zmq(
        self, context: Context, socket_folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        opener = self.opener(transport="gloo", max_communicators=1)
        with closing(self.receiver(opener, context, socket_folder)) as receiver:
            with closing(self.sender(opener, context, receiver.addresses)) as first:
                assert isinstance(first, CollectiveSender)
                with closing(self.sender(opener, context, receiver.addresses)) as second:
                    assert isinstance(second, ZmqSender)
            with closing(self.sender(opener, context, receiver.addresses)) as third:
                assert isinstance(third, CollectiveSender)
        assert "KV to peer goes by zmq (1 others use gloo: transfer.max_communicators)" in caplog.messages

    def test_a_connection_that_cannot_be_opened_takes_no_place(self, context: Context, socket_folder: Path) -> None:
        opener = self.opener(transport="gloo", max_communicators=1)
        with pytest.raises(ConnectionError, match="no way to the peer"):
            self.sender(opener, context, ["gloo://127.0.0.1"])
        with (
            closing(self.receiver(opener, context, socket_folder)) as receiver,
            closing(self.sender(opener, context, receiver.addresses)) as sender,
        ):
            assert isinstance(sender, CollectiveSender)

    def test_gloo_to_a_peer_without_it_is_refused(self, context: Context) -> None:
        with pytest.raises(ConnectionError, match=r"transfer.transport is 'gloo' here, the peer offers \['tcp'\]"):
            self.sender(self.opener(transport="gloo"), context, ["tcp://127.0.0.1:1"])

    def test_nccl_without_a_gpu_is_a_wrong_configuration(self) -> None:
        with pytest.raises(ConfigError, match=r"transport is 'nccl', but this worker computes on 'cpu'.*\nhint: "):
            self.opener(transport="nccl")


def listening_addresses() -> set[str]:
    """Return this process's listening TCP sockets, as the kernel writes them."""
    inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def _is_link(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
