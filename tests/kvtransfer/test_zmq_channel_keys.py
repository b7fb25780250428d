"""The data channel with keys: PROMPT workers get in and reach the COMPLETION worker they mean; nobody else does."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.protocol.keys import KeyPair, PeerKeys, load_keys, make_keys
from twinpool.kvtransfer.frames import Ack, Cancelled
from twinpool.kvtransfer.zmq_channel import ZmqReceiver, ZmqSender

MAX_FRAME_BYTES = 1 << 20
MESSAGE = Cancelled(request_id="r", attempt=1, generation=3)
ACK = Ack(request_id="r", attempt=1, generation=3)
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["router", "prompt", "completion-0", "completion-1"])
    return tmp_path / "keys"


@pytest.fixture
def receiver(context: Context, socket_folder: Path, keys: Path) -> Iterator[ZmqReceiver]:
    with closing(receiver_of(context, socket_folder / "kv", keys)) as receiver:
        yield receiver


def receiver_of(context: Context, path: Path, keys: Path) -> ZmqReceiver:
    return ZmqReceiver(context, path, MAX_FRAME_BYTES, keys=load_keys(keys, "completion-0"))


def sender_to(receiver: ZmqReceiver, context: Context, peer: PeerKeys | None, way: str = "tcp") -> ZmqSender:
    addresses = [address for address in receiver.addresses if address.startswith(way)]
    return ZmqSender(context, addresses, MAX_FRAME_BYTES, 5.0, peer)


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_a_prompt_worker_and_the_receiver_it_means_understand_each_other(
    context: Context, receiver: ZmqReceiver, keys: Path, way: str
) -> None:
    with closing(sender_to(receiver, context, load_keys(keys, "prompt-5").towards("completion-0"), way)) as sender:
        sender.send(MESSAGE)
        assert receiver.socket.poll(5000)
        received = receiver.receive()
        assert received is not None
        assert received.message == MESSAGE
        receiver.reply(received.peer, ACK)
        assert sender.socket.poll(5000)
        assert sender.receive() == ACK


@pytest.mark.parametrize("who", ["an unknown key", "the router", "a COMPLETION worker", "one who means another"])
def test_others_are_told_at_once_that_they_are_not_let_in(
    context: Context, receiver: ZmqReceiver, keys: Path, who: str
) -> None:
    prompt, towards = load_keys(keys, "prompt-0"), load_keys(keys, "prompt-0").towards("completion-0").allowed
    peer = {
        "an unknown key": PeerKeys(KeyPair(*zmq.curve_keypair()), towards),
        "the router": load_keys(keys, "router").towards("completion-0"),
        "a COMPLETION worker": load_keys(keys, "completion-1").towards("completion-0"),
        "one who means another": prompt.towards("completion-1"),
    }[who]
    with pytest.raises(ConnectionError, match=r"do not know each other's keys, or nobody is there; tried 1 allowed"):
        sender_to(receiver, context, peer)
    assert receiver.receive() is None


def test_a_receiver_without_a_known_key_is_not_spoken_to(context: Context, receiver: ZmqReceiver, keys: Path) -> None:
    (keys / "allowed" / "completion-0.pub").unlink()
    with pytest.raises(ConnectionError, match=r"tried 0 allowed keys"):
        sender_to(receiver, context, load_keys(keys, "prompt-0").towards("completion-0"))


def test_without_a_key_nothing_gets_in(context: Context, receiver: ZmqReceiver) -> None:
    with closing(sender_to(receiver, context, None)) as sender:
        sender.send(MESSAGE)
        assert not receiver.socket.poll(700)


@pytest.mark.parametrize("position", [0, 1])
def test_two_keys_of_a_receiver_are_tried_in_turn(
    context: Context, receiver: ZmqReceiver, keys: Path, position: int
) -> None:
    """While keys are being changed it has one of them."""
    public = keys / "allowed" / "completion-0.pub"
    lines = [public.read_bytes().strip()]
    lines.insert(position, zmq.curve_keypair()[0])
    public.write_bytes(b"\n".join(lines))
    with closing(sender_to(receiver, context, load_keys(keys, "prompt-0").towards("completion-0"))) as sender:
        sender.send(MESSAGE)
        assert receiver.socket.poll(5000)
        sender.socket.send_multipart([b"", b""])
        assert receiver.receive() is not None, "and it came once"
        assert receiver.socket.poll(5000)
        assert receiver.receive() is None


def test_other_machines_get_in_only_with_keys(context: Context, socket_folder: Path, keys: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data-host 0\.0\.0\.0 is not loopback\nhint: .*`twinpool keys"):
        ZmqReceiver(context, socket_folder / "open", MAX_FRAME_BYTES, "0.0.0.0")
    with pytest.raises(ConnectionError, match=r"tcp://10\.0\.0\.1:5 is on another machine, which takes keys"):
        ZmqSender(context, ["tcp://10.0.0.1:5"], MAX_FRAME_BYTES, 5.0)
    ring = load_keys(keys, "completion-0")
    with closing(ZmqReceiver(context, socket_folder / "kv", MAX_FRAME_BYTES, "0.0.0.0", keys=ring)) as receiver:
        assert receiver.addresses[1].startswith("tcp://0.0.0.0:")
