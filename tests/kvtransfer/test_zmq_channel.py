"""The data channel's sockets: what passes, what is dropped, which way is taken."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
import zmq
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.protocol.messages import PrefillStages, SampledToken
from twinpool.kvtransfer.frames import (
    Ack,
    Cancelled,
    Credit,
    DataMessage,
    Done,
    KVFrame,
    Reject,
    checksum,
    encode_header,
)
from twinpool.kvtransfer.zmq_channel import ZmqReceiver, ZmqSender, choose_address
from zmq.utils.monitor import recv_monitor_message

MAX_FRAME_BYTES = 1 << 20
ONE = {"request_id": "r", "attempt": 1, "generation": 3}
STAGES = PrefillStages(queue_s=0, prefill_s=1, num_computed_tokens=8, num_kv_bytes=9, num_kv_bytes_arrived=8)
Context = zmq.Context[zmq.Socket[bytes]]
T = TypeVar("T")


def kv_frame(payload: bytes) -> KVFrame:
    return KVFrame(
        **ONE,
        layout=1,
        sequence=0,
        layer_start=0,
        layer_end=1,
        token_start=0,
        token_end=1,
        num_bytes=len(payload),
        checksum=checksum(payload),
    )


@pytest.fixture
def receiver(context: Context, socket_folder: Path) -> Iterator[ZmqReceiver]:
    receiver = ZmqReceiver(context, socket_folder / "kv", MAX_FRAME_BYTES)
    yield receiver
    receiver.close()


@pytest.fixture(params=["ipc", "tcp"])
def sender(request: pytest.FixtureRequest, context: Context, receiver: ZmqReceiver) -> Iterator[ZmqSender]:
    addresses = [address for address in receiver.addresses if address.startswith(request.param)]
    sender = ZmqSender(context, addresses, MAX_FRAME_BYTES, send_timeout_s=5.0)
    yield sender
    sender.close()


def wait_for(receive: Callable[[], T | None], socket: zmq.Socket[bytes]) -> T:
    while (message := receive()) is None:
        assert socket.poll(10_000), "nothing came"
    return message


def test_header_and_payload_arrive_and_the_answer_comes_back(receiver: ZmqReceiver, sender: ZmqSender) -> None:
    """Small payloads are copied, large ones lent; both arrive whole, in order, with an empty one between."""
    payloads = [b"x" * 10, bytes(range(256)) * 2000, b"y"]
    for payload in payloads:
        sender.send(kv_frame(payload), memoryview(payload))
        sender.send(Cancelled(**ONE))
    for payload in payloads:
        received = wait_for(receiver.receive, receiver.socket)
        assert (received.message, bytes(received.payload)) == (kv_frame(payload), payload)
        assert received.is_intact
        received = wait_for(receiver.receive, receiver.socket)
        assert received.message == Cancelled(**ONE)
        replies: list[DataMessage] = [Credit(**ONE, num_bytes=3), Ack(**ONE), Reject(**ONE, reason="no")]
        for reply in replies:
            receiver.reply(received.peer, reply)
            assert wait_for(sender.receive, sender.socket) == reply
    assert receiver.receive() is None
    assert sender.receive() is None


def test_a_payload_that_is_not_what_was_checksummed_is_marked(receiver: ZmqReceiver, sender: ZmqSender) -> None:
    sender.send(kv_frame(b"right bytes"), b"wrong bytes")
    assert not wait_for(receiver.receive, receiver.socket).is_intact


def test_only_a_frame_can_be_intact(receiver: ZmqReceiver, sender: ZmqSender) -> None:
    sender.send(Done(**ONE, num_frames=0, digest=0, position=0, token=SampledToken(token=1), stages=STAGES))
    assert not wait_for(receiver.receive, receiver.socket).is_intact


@pytest.mark.parametrize(
    "parts",
    [
        [b"one part"],
        [b""],
        [encode_header(Cancelled(**ONE))],
        [encode_header(Cancelled(**ONE)), b"", b""],
        [b"\xc1 no header", b""],
        [b"\x91" * 1000, b""],
        [b"\x00" * 20_000, b""],
        [encode_header(Ack(**ONE)), b""],  # what only a receiver says
    ],
)
def test_malformed_messages_are_dropped_and_counted(
    receiver: ZmqReceiver, sender: ZmqSender, parts: list[bytes]
) -> None:
    sender.socket.send_multipart(parts)
    sender.send(Cancelled(**ONE))
    assert wait_for(receiver.receive, receiver.socket).message == Cancelled(**ONE), "the next one passes"
    assert receiver.num_malformed == 1


def test_malformed_replies_are_dropped(receiver: ZmqReceiver, sender: ZmqSender) -> None:
    sender.send(Cancelled(**ONE))
    peer = wait_for(receiver.receive, receiver.socket).peer
    for header in (b"\xc1", encode_header(Cancelled(**ONE)), b"\x91" * 1000):
        receiver.socket.send_multipart([peer, header])
    receiver.reply(peer, Ack(**ONE))
    assert wait_for(sender.receive, sender.socket) == Ack(**ONE)


def test_a_reply_to_nobody_is_no_error(receiver: ZmqReceiver) -> None:
    receiver.reply(b"\x00gone", Ack(**ONE))
    assert receiver.receive() is None


def test_a_message_larger_than_agreed_is_not_taken(context: Context, receiver: ZmqReceiver) -> None:
    """The connection is closed instead of the memory filled; a peer that behaves is served."""
    giant = ZmqSender(context, receiver.addresses, 1 << 30, send_timeout_s=5.0)
    honest = ZmqSender(context, receiver.addresses, MAX_FRAME_BYTES, send_timeout_s=5.0)
    giant.send(kv_frame(b""), b"x" * (2 * MAX_FRAME_BYTES))
    honest.send(Cancelled(**ONE))
    assert wait_for(receiver.receive, receiver.socket).message == Cancelled(**ONE)
    assert not receiver.socket.poll(300), "the giant's frame came through"
    giant.close()
    honest.close()


def test_sending_to_nobody_ends_with_a_timeout(context: Context, socket_folder: Path) -> None:
    """Nothing listens; the queue fills, and then send gives up instead of waiting for ever."""
    (socket_folder / "nobody").touch()
    sender = ZmqSender(context, [f"ipc://{socket_folder}/nobody"], MAX_FRAME_BYTES, send_timeout_s=0.05)

    def send_many() -> None:
        for _ in range(1000):
            sender.send(Cancelled(**ONE))

    with pytest.raises(TimeoutError, match="takes no data"):
        send_many()
    sender.close()


def test_a_connection_that_nobody_answers_is_tried_again_soon(context: Context) -> None:
    """A SYN that gets lost: the kernel alone would keep at it for two minutes before ZMQ could try anew."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with socket.create_connection(address), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(address)  # whatever the backlog of 0 still takes: from here on SYNs are dropped
            to_full = ZmqSender(context, [f"tcp://127.0.0.1:{address[1]}"], MAX_FRAME_BYTES, send_timeout_s=0.1)
            events = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED
            with closing(to_full) as sender, sender.socket.get_monitor_socket(events) as monitor:
                event = recv_monitor_message(monitor)["event"] if monitor.poll(10_000) else None
                sender.socket.disable_monitor()
    assert event == zmq.EVENT_CONNECT_RETRIED, "the first try was not given up"


def test_ipc_where_its_socket_is_and_else_tcp(socket_folder: Path) -> None:
    here, tcp = socket_folder / "kv", "tcp://10.0.0.1:5"
    addresses = [f"ipc://{here}", tcp]
    assert choose_address(addresses) == tcp, "that path is on another machine"
    here.touch()
    assert choose_address(addresses) == f"ipc://{here}"
    assert choose_address([tcp, f"ipc://{here}"]) == f"ipc://{here}"
    assert choose_address([tcp]) == tcp


@pytest.mark.parametrize("addresses", [[], ["ipc:///nowhere/at/all"]])
def test_no_way_to_the_peer_is_a_clear_error(addresses: list[str]) -> None:
    """Regression: StopIteration."""
    with pytest.raises(ConnectionError, match="no way to the peer"):
        choose_address(addresses)


def test_a_receiver_names_both_ways_to_it(receiver: ZmqReceiver, socket_folder: Path) -> None:
    ipc, tcp = receiver.addresses
    assert ipc == f"ipc://{socket_folder}/kv"
    assert tcp.startswith("tcp://127.0.0.1:")
    assert choose_address(receiver.addresses) == ipc


def test_a_socket_path_that_is_too_long_is_named(context: Context, socket_folder: Path) -> None:
    """Unix socket paths end at about 107 characters; the user gets a hint, not a traceback."""
    path = socket_folder / ("x" * 120)
    with pytest.raises(ConfigError, match=r"cannot open the data socket .*x: .*\nhint: --run-folder"):
        ZmqReceiver(context, path, MAX_FRAME_BYTES)


def test_the_tcp_port_can_be_chosen_and_one_that_is_taken_is_named(
    context: Context, receiver: ZmqReceiver, socket_folder: Path
) -> None:
    """Whoever is reached through something else (a proxy, a Kubernetes service) needs a port that is known before."""
    port = int(receiver.addresses[1].rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"cannot open the data socket tcp://127\.0\.0\.1:{port}: .*in use"):
        ZmqReceiver(context, socket_folder / "other", MAX_FRAME_BYTES, tcp_port=port)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    with closing(ZmqReceiver(context, socket_folder / "other", MAX_FRAME_BYTES, tcp_port=free_port)) as other:
        assert other.addresses[1] == f"tcp://127.0.0.1:{free_port}"
