"""The headers of the data channel: they survive the wire, nothing else passes for one."""

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from fuzzing import assert_small, count_refused, damaged, with_one_hostile
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
VERSION = bytes([PROTOCOL_VERSION])


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
        [PROTOCOL_VERSION, "Ack"],
        [PROTOCOL_VERSION, "Nobody", {}],
        [PROTOCOL_VERSION, ["Ack"], {}],
        [PROTOCOL_VERSION, {}, {}],
        [PROTOCOL_VERSION, "Ack", None],
        [PROTOCOL_VERSION, "Ack", {**ONE, "generation": 0}],
        [PROTOCOL_VERSION, "Ack", {**ONE, "more": 1}],
        [PROTOCOL_VERSION, "Ack", {**ONE, "request_id": ""}],
        [PROTOCOL_VERSION, "Ack", {**ONE, "attempt": msgpack.ExtType(5, b"x")}],
        [PROTOCOL_VERSION, "Credit", {**ONE, "num_bytes": -1}],
        [PROTOCOL_VERSION, "Credit", {**ONE, "num_bytes": 2**40 + 1}],
    ],
)
def test_anything_else_is_a_protocol_error(value: Any) -> None:
    packed: bytes = msgpack.packb(value)
    with pytest.raises(ProtocolError):
        decode_header(packed, KINDS)


@pytest.mark.parametrize("depth", [500, 1000, 1020, 8000])
@pytest.mark.parametrize("prefix", [b"", b"\x93", b"\x93" + VERSION, b"\x93" + VERSION + b"\xa3Ack"])
def test_deep_nesting_is_only_a_protocol_error(depth: int, prefix: bytes) -> None:
    tail = {b"": b"", b"\x93": b"\xa3Ack\x80", b"\x93" + VERSION: b"\x80", b"\x93" + VERSION + b"\xa3Ack": b""}[prefix]
    with pytest.raises(ProtocolError):
        decode_header(prefix + b"\x91" * depth + b"\xc0" + tail, FROM_RECEIVER)


def fuzzed_headers(count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    originals = [encode_header(sample) for sample in SAMPLES]
    trees = [msgpack.unpackb(header) for header in originals]
    for _ in range(count):
        number, how = rng.randrange(len(SAMPLES)), rng.random()
        if how < 0.6:
            yield damaged(rng, originals[number])
        elif how < 0.9:
            yield msgpack.packb(with_one_hostile(rng, trees[number])) or b""
        else:
            yield rng.randbytes(rng.randrange(200))


@pytest.mark.parametrize(
    "count", [100_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_fuzzed_headers_are_read_or_refused_and_nothing_else(count: int) -> None:
    def read(header: bytes) -> None:
        assert type(decode_header(header, KINDS)) in KINDS.values()

    num_all, num_refused = count_refused(read, fuzzed_headers(count, seed=21), (ProtocolError,))
    assert num_all == count
    assert 0.3 * count < num_refused < count


def test_headers_of_full_size_stay_small_and_quick() -> None:
    fillings = [MAX_HEADER_BYTES * byte for byte in (b"\x80", b"\x90", b"\xc0", b"\x91", b"\xc1")]
    arrays = [b"\xdc\x3f\xf0" + filling for filling in fillings]
    claims = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x0f\x42\x40" * 400]
    headers = [header[:MAX_HEADER_BYTES] for header in (*fillings, *arrays, *claims)]
    assert_small(lambda header: decode_header(header, KINDS), headers, (ProtocolError,))


def test_the_checksum_and_the_digest_notice_order_and_content() -> None:
    assert checksum(b"abc") == checksum(memoryview(b"abc")) != checksum(b"abd")
    first, second = checksum(b"a"), checksum(b"b")
    there = extend_digest(extend_digest(0, first), second)
    back = extend_digest(extend_digest(0, second), first)
    assert len({there, back, extend_digest(0, first), 0}) == 4
