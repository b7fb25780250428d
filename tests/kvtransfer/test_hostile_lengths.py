"""Lengths, counts and ranges that a peer makes up: refused before anything of that size is allocated or written."""

import itertools
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
from twinpool.cluster.protocol.codec import FROM_WORKER, decode
from twinpool.cluster.protocol.errors import ProtocolError
from twinpool.cluster.protocol.identity import PROTOCOL_VERSION
from twinpool.engine.fake import FAKE_LAYOUT
from twinpool.kvtransfer.frames import FROM_SENDER, KVFrame, checksum, decode_header
from twinpool.kvtransfer.receiver import Receiver, Write

MAX_ALLOCATED_BYTES = 1 << 20
NUM_TOKENS = 12
PAYLOAD = bytes(FAKE_LAYOUT.frame_bytes(FAKE_LAYOUT.num_layers, NUM_TOKENS))
HOSTILE = (-1, -(2**31), -(2**63), 2**31, 2**32 - 1, 2**40, 2**40 + 1, 2**63 - 1, 2**63, 2**64 - 1)
RIGHT: dict[str, Any] = {
    "request_id": "r",
    "attempt": 1,
    "generation": 3,
    "layout": FAKE_LAYOUT.fingerprint,
    "sequence": 0,
    "layer_start": 0,
    "layer_end": FAKE_LAYOUT.num_layers,
    "token_start": 0,
    "token_end": NUM_TOKENS,
    "num_bytes": len(PAYLOAD),
    "checksum": checksum(PAYLOAD),
}
PLACES = ("sequence", "layer_start", "layer_end", "token_start", "token_end", "num_bytes", "generation")


@contextmanager
def little_is_allocated() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_ALLOCATED_BYTES
    finally:
        tracemalloc.stop()


def is_written(fields: dict[str, Any]) -> bool:
    """Offer a frame with this header to a receiver that waits for the right one."""
    receiver = Receiver(FAKE_LAYOUT, 5.0)
    receiver.grant(("r", 1), 3, range(NUM_TOKENS), 0.0)
    packed: bytes = msgpack.packb([PROTOCOL_VERSION, "KVFrame", fields])
    try:
        frame = decode_header(packed, FROM_SENDER)
    except ProtocolError:
        return False
    assert isinstance(frame, KVFrame)
    is_intact = checksum(PAYLOAD) == frame.checksum
    return any(isinstance(command, Write) for command in receiver.frame(frame, len(PAYLOAD), is_intact, 1.0))


def test_the_right_frame_is_written() -> None:
    assert is_written(RIGHT)


@pytest.mark.parametrize("place", PLACES)
def test_a_made_up_number_is_refused(place: str) -> None:
    for value in HOSTILE:
        with little_is_allocated():
            assert not is_written({**RIGHT, place: value}), value


def test_products_that_would_overflow_are_refused() -> None:
    """Two numbers that together could wrap around to the right size in a machine's arithmetic."""
    for first, second in itertools.combinations(PLACES, 2):
        for one, two in itertools.product((-1, 2**32, 2**40, 2**63), repeat=2):
            with little_is_allocated():
                assert not is_written({**RIGHT, first: one, second: two}), (first, one, second, two)


CLAIMS = {
    "array": lambda n: b"\xdd" + struct.pack(">I", n),
    "map": lambda n: b"\xdf" + struct.pack(">I", n),
    "text": lambda n: b"\xdb" + struct.pack(">I", n),
    "bytes": lambda n: b"\xc6" + struct.pack(">I", n),
    "extension": lambda n: b"\xc9" + struct.pack(">I", n) + b"\x01",
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize("prefix", [b"", b"\x93", b"\x93\x03", b"\x93\x03\xa5Hello", b"\x93\x03\xa7KVFrame"], ids=str)
def test_a_container_that_claims_more_than_came_is_refused(claim: Callable[[int], bytes], prefix: bytes) -> None:
    for count in (10_000, 10**9, 2**32 - 1):
        for body in (prefix + claim(count), prefix + claim(count) + b"\xc0" * 1000, prefix + claim(count) * 100):
            with little_is_allocated(), pytest.raises(ProtocolError):
                decode([body], FROM_WORKER)
            with little_is_allocated(), pytest.raises(ProtocolError):
                decode_header(body, FROM_SENDER)
