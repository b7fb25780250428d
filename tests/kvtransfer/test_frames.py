"""The headers of the data channel: they survive the wire, nothing else passes for one."""

import random
from typing import Any

import msgpack
import pytest
from twinpool.cluster.protocol.errors import ProtocolError
from twinpool.cluster.protocol.identity import PROTOCOL_VERSION
from twinpool.cluster.protocol.messages import PrefillStages, SampledToken
from twinpool.kvtransfer.frames import (
    FROM_RECEIVER,
    FROM_SENDER,
    MAX_HEADER_BYTES,
    Ack,
    Cancelled,
    Credit,
    DataMessage,
    Done,
    KVFrame,
    Reject,
    checksum,
    decode_header,
    encode_header,
    extend_digest,
)

ONE = {"request_id": "r" * 24, "attempt": 2, "generation": 5}
STAGES = PrefillStages(queue_s=0.5, prefill_s=1.0, num_computed_tokens=3, num_kv_bytes=9, num_kv_bytes_arrived=8)
TOKEN = SampledToken(token=7, logprob=-0.5, top=tuple((2**31 - 1, float("-inf")) for _ in range(20)))
FRAME = KVFrame(
    **ONE,
    layout=2**64 - 1,
    sequence=0,
    layer_start=0,
    layer_end=3,
    token_start=5,
    token_end=9,
    num_bytes=2**40,
    checksum=2**64 - 1,
)
DONE = Done(**ONE, num_frames=3, digest=2**64 - 1, position=0, token=TOKEN, stages=STAGES)
SAMPLES: list[DataMessage] = [
    FRAME,
    DONE,
    Cancelled(**ONE),
    Credit(**ONE, num_bytes=5),
    Ack(**ONE),
    Reject(**ONE, reason="é" * 512),
]
KINDS = FROM_SENDER | FROM_RECEIVER


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_a_header_survives_the_wire(message: DataMessage) -> None:
    assert decode_header(encode_header(message), KINDS) == message
    assert decode_header(memoryview(encode_header(message)), KINDS) == message
    assert message.key == ("r" * 24, 2)


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(sample) for sample in SAMPLES} == set(KINDS.values())


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_the_other_direction_is_refused(message: DataMessage) -> None:
    wrong = FROM_RECEIVER if type(message) in FROM_SENDER.values() else FROM_SENDER
    with pytest.raises(ProtocolError):
        decode_header(encode_header(message), wrong)


def test_a_header_beyond_the_limit_is_not_read() -> None:
    with pytest.raises(ProtocolError, match=f"allowed are {MAX_HEADER_BYTES}"):
        decode_header(b"\x00" * (MAX_HEADER_BYTES + 1), FROM_SENDER)


def test_another_version_is_named() -> None:
    packed: bytes = msgpack.packb([PROTOCOL_VERSION + 1, "Ack", ONE])
    with pytest.raises(ProtocolError, match=f"version {PROTOCOL_VERSION + 1}, this process speaks {PROTOCOL_VERSION}"):
        decode_header(packed, FROM_RECEIVER)


@pytest.mark.parametrize(
    "value",
    [
        1,
        [],
        [1, "Ack"],
        [1, "Nobody", {}],
        [1, ["Ack"], {}],
        [1, {}, {}],
        [1, "Ack", None],
        [1, "Ack", {**ONE, "generation": 0}],
        [1, "Ack", {**ONE, "more": 1}],
        [1, "Ack", {**ONE, "request_id": ""}],
        [1, "Ack", {**ONE, "attempt": msgpack.ExtType(5, b"x")}],
        [1, "Credit", {**ONE, "num_bytes": -1}],
        [1, "Credit", {**ONE, "num_bytes": 2**40 + 1}],
    ],
)
def test_anything_else_is_a_protocol_error(value: Any) -> None:
    packed: bytes = msgpack.packb(value)
    with pytest.raises(ProtocolError):
        decode_header(packed, KINDS)


@pytest.mark.parametrize("depth", [500, 1000, 1020, 8000])
@pytest.mark.parametrize("prefix", [b"", b"\x93", b"\x93\x01", b"\x93\x01\xa3Ack"])
def test_deep_nesting_is_only_a_protocol_error(depth: int, prefix: bytes) -> None:
    tail = {b"": b"", b"\x93": b"\xa3Ack\x80", b"\x93\x01": b"\x80", b"\x93\x01\xa3Ack": b""}[prefix]
    with pytest.raises(ProtocolError):
        decode_header(prefix + b"\x91" * depth + b"\xc0" + tail, FROM_RECEIVER)


def test_mutated_headers_are_read_or_refused_and_nothing_else() -> None:
    rng = random.Random(21)
    originals = [encode_header(sample) for sample in SAMPLES]
    num_refused = 0
    for _ in range(10_000):
        header = bytearray(rng.choice(originals))
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(header))
            match rng.randrange(3):
                case 0:
                    header[place] ^= 1 << rng.randrange(8)
                case 1:
                    header.insert(place, rng.randrange(256))
                case _:
                    del header[place : place + 1 + rng.randrange(3)]
        try:
            assert type(decode_header(bytes(header), KINDS)) in KINDS.values()
        except ProtocolError:
            num_refused += 1
    assert num_refused > 3000


def test_the_checksum_and_the_digest_notice_order_and_content() -> None:
    assert checksum(b"abc") == checksum(memoryview(b"abc")) != checksum(b"abd")
    first, second = checksum(b"a"), checksum(b"b")
    there = extend_digest(extend_digest(0, first), second)
    back = extend_digest(extend_digest(0, second), first)
    assert len({there, back, extend_digest(0, first), 0}) == 4
