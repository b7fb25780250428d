"""The frame proxy breaks what it is told to break, counts it, and leaves the rest alone: with plain ZMQ sockets."""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import zmq
from frame_proxy import Faults, FrameProxy
from zmtp import Message, Parser, Raw

NUM_MESSAGES = 200


@dataclass
class Link:
    """A DEALER that reaches a ROUTER through a proxy, as our links do."""

    dealer: zmq.Socket[bytes]
    router: zmq.Socket[bytes]
    proxy: FrameProxy

    def send(self, *frames: bytes) -> None:
        self.dealer.send_multipart(frames)

    def receive(self, timeout_s: float = 10.0) -> list[bytes] | None:
        """Return the next message without the peer's name, or None when there is none in time."""
        return self.router.recv_multipart()[1:] if self.router.poll(int(timeout_s * 1000)) else None

    def receive_all(self, quiet_s: float = 0.5) -> list[list[bytes]]:
        """Return what comes until nothing has come for a while."""
        received: list[list[bytes]] = []
        while (message := self.receive(10.0 if not received else quiet_s)) is not None:
            received.append(message)
        return received


@pytest.fixture
def link() -> Iterator[Link]:
    threads = set(threading.enumerate())
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        proxy = FrameProxy(port, seed=7)
        for socket in (router, dealer):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, 10_000)
        dealer.setsockopt(zmq.RECONNECT_IVL, 20)
        dealer.connect(proxy.address)
        yield Link(dealer, router, proxy)
        proxy.close()
    assert set(threading.enumerate()) <= threads


def numbered(count: int = NUM_MESSAGES, size: int = 100) -> list[list[bytes]]:
    return [[b"header %d" % i, b"%d" % i * size] for i in range(count)]


def test_without_faults_everything_passes_both_ways(link: Link) -> None:
    """Short, long and empty frames, one frame or five, and a message larger than what the proxy holds."""
    messages = [[b""], [b"a", b""], [b"x" * 255, b"y" * 256, b"", b"z", b"end"], [b"big", bytes(3 << 20)]]
    for message in messages:
        link.send(*message)
        peer, *frames = link.router.recv_multipart()
        assert frames == message
        link.router.send_multipart([peer, *message])
        assert link.dealer.recv_multipart() == message
    assert [direction.counts for direction in link.proxy.directions] == [{"passed": 4}, {"passed": 4}]


@pytest.mark.parametrize("step", [1, 3, 64, 1000])
def test_the_parser_finds_the_same_units_however_the_bytes_are_cut(step: int) -> None:
    greeting, ping = random.Random(1).randbytes(64), b"\x04\x05\x04PING"
    messages = [Message((b"h", b"x" * 300)), Message((b"",)), Message((b"a" * 255, b"b" * 256, b"c"))]
    data = greeting + ping + b"".join(message.data + ping for message in messages)
    parser = Parser()
    units = [unit for i in range(0, len(data), step) for unit in parser.feed(data[i : i + step])]
    assert [unit for unit in units if isinstance(unit, Message)] == messages
    assert b"".join(unit.data for unit in units if isinstance(unit, Raw)) == greeting + ping * 4
    assert b"".join(unit.data for unit in units) == data


def test_dropped_messages_are_missing_and_counted(link: Link) -> None:
    link.proxy.to_target.faults = Faults(drop=0.1)
    for message in numbered():
        link.send(*message)
    received = link.receive_all()
    assert 5 <= link.proxy.to_target.counts["dropped"] <= 50
    assert len(received) == NUM_MESSAGES - link.proxy.to_target.counts["dropped"]
    assert received == [message for message in numbered() if message in received], "whole, and in order"


def test_doubled_messages_come_twice_in_a_row(link: Link) -> None:
    link.proxy.to_target.faults = Faults(duplicate=0.2)
    for message in numbered():
        link.send(*message)
    received = link.receive_all()
    num_doubled = link.proxy.to_target.counts["duplicated"]
    assert 10 <= num_doubled <= 100
    assert sum(a == b for a, b in pairwise(received)) == num_doubled
    assert len(received) == NUM_MESSAGES + num_doubled


def test_reordered_messages_change_places_with_the_next(link: Link) -> None:
    """Each swap makes one descent; nothing is lost, not even the last, which has no next one."""
    link.proxy.to_target.faults = Faults(reorder=0.2)
    for message in numbered():
        link.send(*message)
    received = link.receive_all()
    numbers = [int(header.removeprefix(b"header ")) for header, _ in received]
    num_swapped = link.proxy.to_target.counts["reordered"]
    assert 10 <= num_swapped <= 100
    assert sum(a > b for a, b in pairwise(numbers)) == num_swapped
    assert sorted(received) == sorted(numbered())
    link.proxy.to_target.faults = Faults(reorder=1.0)
    link.send(b"header", b"the last")
    assert link.receive() == [b"header", b"the last"]


def test_flips_and_truncations_damage_payloads_alone(link: Link) -> None:
    """One bit of a payload, or its end; headers and empty payloads stay as they are."""
    link.proxy.to_target.faults = Faults(flip=0.3, truncate=0.3)
    sent = [*numbered(), [b"header", b""]]
    for message in sent:
        link.send(*message)
    received = link.receive_all()
    assert [header for header, _ in received] == [header for header, _ in sent]
    pairs = [(was, came) for (_, was), (_, came) in zip(sent, received, strict=True) if was != came]
    shorter = [(was, came) for was, came in pairs if len(came) < len(was)]
    flipped = [(was, came) for was, came in pairs if len(came) == len(was)]
    counts = link.proxy.to_target.counts
    assert (len(flipped), len(shorter)) == (counts["flipped"], counts["truncated"])
    assert min(len(flipped), len(shorter)) > 20
    assert all(was.startswith(came) for was, came in shorter)
    assert all(sum((a ^ b).bit_count() for a, b in zip(was, came, strict=True)) == 1 for was, came in flipped)


def test_only_what_the_faults_apply_to_is_touched(link: Link) -> None:
    link.proxy.to_target.faults = Faults(drop=1.0, applies_to=lambda message: message.frames[0] == b"header 3")
    for message in numbered(10):
        link.send(*message)
    assert link.receive_all() == [message for message in numbered(10) if message[0] != b"header 3"]


def test_the_same_seed_does_the_same(link: Link) -> None:
    """What happens is drawn message by message from the seed."""
    faults = Faults(drop=0.2, duplicate=0.2, flip=0.2)
    runs: list[list[Message]] = []
    for _ in range(2):
        proxy = FrameProxy(1, seed=3)
        proxy.to_target.faults = faults
        runs.append([m for frames in numbered() for m in proxy.to_target.disturb(Message(tuple(frames)))])
        proxy.close()
    assert runs[0] == runs[1]


def test_late_messages_come_in_order(link: Link) -> None:
    link.proxy.to_target.faults = Faults(delay_s=(0.0, 0.1))
    began_s = time.monotonic()
    for message in numbered(50):
        link.send(*message)
    assert [link.receive() for _ in range(50)] == numbered(50)
    assert time.monotonic() - began_s >= 0.05, "the longest of 50 draws"


def test_a_slow_direction_makes_the_sender_wait(link: Link) -> None:
    """One message a second: the proxy and the kernel hold little, the rest is the sender's to keep."""
    link.proxy.to_target.faults = Faults(messages_per_s=1)
    link.dealer.setsockopt(zmq.SNDHWM, 2)
    link.dealer.setsockopt(zmq.SNDTIMEO, 200)
    link.dealer.disconnect(link.proxy.address)
    link.dealer.connect(link.proxy.address)

    def send_much() -> None:
        for _ in range(40):
            link.send(b"header", bytes(1 << 20))

    with pytest.raises(zmq.Again):
        send_much()
    assert link.receive() == [b"header", bytes(1 << 20)]
    link.proxy.to_target.faults = Faults(bytes_per_s=10e6)
    began_s = time.monotonic()
    assert all(link.receive() for _ in range(2))
    assert time.monotonic() - began_s >= 0.1


def test_a_stalled_direction_holds_everything_and_lets_it_pass_later(link: Link) -> None:
    """The other direction still works; a connection made meanwhile gets no answer until the end of the stall."""
    link.send(b"header", b"first")
    peer = link.router.recv_multipart()[0]
    with link.proxy.stalled(link.proxy.to_target):
        link.send(b"header", b"held")
        assert link.receive(0.3) is None
        link.router.send_multipart([peer, b"back"])
        assert link.dealer.recv() == b"back"
    assert link.receive() == [b"header", b"held"]
    with link.proxy.stalled():
        link.router.send_multipart([peer, b"held as well"])
        assert not link.dealer.poll(300)
    assert link.dealer.recv() == b"held as well"


def test_a_cut_ends_connections_and_the_next_one_works(link: Link) -> None:
    link.send(b"header", b"before")
    assert link.receive() == [b"header", b"before"]
    link.proxy.cut()
    received = None
    for _ in range(100):  # what ZMQ had taken for the old connection may be lost with it
        link.send(b"header", b"after")
        received = link.receive(0.2)
        if received is not None:
            break
    assert received == [b"header", b"after"]
    assert link.proxy.num_connections >= 2


def test_a_target_that_is_not_there_looks_like_one() -> None:
    """Connections are ended, and when the target comes, messages pass."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        router.unbind(f"tcp://127.0.0.1:{port}")
        proxy = FrameProxy(port)
        dealer.setsockopt(zmq.RECONNECT_IVL, 20)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(proxy.address)
        dealer.send(b"hello")
        assert not router.poll(200)
        router.bind(f"tcp://127.0.0.1:{port}")
        assert router.recv_multipart()[1] == b"hello"
        proxy.close()
