"""Every control message survives the wire, and nothing else passes for one."""

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from fuzzing import assert_small, count_refused, damaged, with_one_hostile
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError
from twinpool.cluster.protocol.codec import (
    FROM_ROUTER,
    FROM_WORKER,
    MAX_BODY_BYTES,
    MAX_TOKEN_FRAME_BYTES,
    decode,
    encode,
)
from twinpool.cluster.protocol.errors import ProtocolError
from twinpool.cluster.protocol.identity import PROTOCOL_VERSION
from twinpool.cluster.protocol.messages import (
    MAX_SCORES_PER_MESSAGE,
    Busy,
    Cancel,
    DecodeStages,
    Failed,
    FirstToken,
    Granted,
    GrantRequest,
    Handback,
    Heartbeat,
    Hello,
    Introduce,
    KVLayoutInfo,
    Leaving,
    Load,
    Message,
    ModelIdentity,
    PassesTimed,
    PeerGone,
    Prefill,
    PrefillStages,
    PromptScores,
    Refused,
    Renew,
    SampledToken,
    SamplingParams,
    SequenceTokens,
    TimePasses,
    TimeTransfer,
    Tokens,
    TransferTimed,
    Unknown,
    Welcome,
)

SAMPLING = SamplingParams(
    max_tokens=7,
    temperature=0.25,
    logit_bias={0: -100.0, 2**31 - 1: 5.5},
    stop_token_ids=(2, 0),
    seed=-(2**63),
    num_logprobs=3,
)
STAGES = PrefillStages(
    queue_s=0.5, prefill_s=1.25, num_computed_tokens=9, num_kv_bytes=2**33, num_kv_bytes_arrived=2**32
)
TOKEN = SampledToken(token=2**31 - 1, logprob=-0.125, top=((5, -0.125), (0, float("-inf"))))
LOAD = Load(num_blocks=9, num_free_blocks=4, num_queued_tokens=5)
IDENTITY = ModelIdentity(
    model="m",
    fingerprint="f",
    dtype="bfloat16",
    layout=KVLayoutInfo(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16"),
)
ONE = {"request_id": "r" * 24, "attempt": 3}
SAMPLES: list[Message] = [
    Hello(
        role="COMPLETION",
        pid=7,
        host="ü",
        identity=IDENTITY,
        block_size=16,
        num_blocks=9,
        max_model_len=99,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        data_addresses=("ipc:///tmp/x", "tcp://127.0.0.1:1"),
    ),
    Heartbeat(progress=5, is_busy=True, load=LOAD),
    Granted(**ONE, generation=2**40, credit_bytes=1, num_cached_tokens=4, num_free_blocks=0),
    Busy(**ONE, num_free_blocks=3),
    PromptScores(**ONE, position=1, tokens=(TOKEN, SampledToken(token=7, logprob=-1.5))),
    FirstToken(**ONE, position=2, token=TOKEN, finish_reason="stop", stages=STAGES),
    Tokens(
        sequences=(
            SequenceTokens(
                **ONE,
                position=0,
                tokens=(TOKEN, SampledToken(token=0)),
                stages=DecodeStages(since_last_kv_s=0.5, prefill=STAGES),
            ),
            SequenceTokens(**ONE, position=9, tokens=(), finish_reason="length"),
        ),
        num_free_blocks=3,
    ),
    Handback(**ONE, num_output_tokens=3, num_free_blocks=3),
    Failed(**ONE, reason="x", is_retryable=False),
    Unknown(requests=(("a", 1), ("b", 2))),
    PassesTimed(probe_id="p", pass_s=tuple(0.1 * i for i in range(1000))),
    TransferTimed(probe_id="p", transfer_s=0.25),
    Welcome(router_incarnation="abc"),
    Refused(reason="é" * 1024),
    Introduce(),
    Leaving(),
    GrantRequest(**ONE, num_output_tokens=1, arrival_order=5, sampling=SAMPLING, token_ids=(0, 5, 2**31 - 1)),
    Prefill(
        **ONE,
        sampling=SAMPLING,
        generation=1,
        credit_bytes=1,
        receiver="c/1",
        receiver_addresses=("tcp://127.0.0.1:1",),
        token_ids=tuple(range(1000)),
    ),
    Cancel(**ONE, sender_is_active=True),
    PeerGone(worker="completion-0/1"),
    Renew(requests=(("a", 1),), prefilled=(("b", 2),)),
    TimePasses(
        probe_id="p", rows=((2**31 - 1, 2**31 - 1),) * 1023 + ((0, 1),), num_warmup=0, num_repeats=1000, limit_s=0.5
    ),
    TimeTransfer(
        probe_id="p", num_tokens=7, generation=1, credit_bytes=1, receiver="c/1", receiver_addresses=("ipc:///x",)
    ),
]
KINDS = FROM_WORKER | FROM_ROUTER
VERSION = bytes([PROTOCOL_VERSION])


def body(name: Any, fields: Any, version: Any = PROTOCOL_VERSION) -> bytes:
    packed: bytes = msgpack.packb([version, name, fields])
    return packed


def test_there_is_a_sample_of_every_message() -> None:
    """So that a new message cannot be left out of the tests below."""
    assert {type(sample) for sample in SAMPLES} == set(KINDS.values())
    assert not set(FROM_WORKER) & set(FROM_ROUTER)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message), KINDS) == message


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_of_the_other_direction_is_refused(message: Message) -> None:
    """A worker cannot give orders, and the router cannot report."""
    wrong = FROM_ROUTER if type(message) in FROM_WORKER.values() else FROM_WORKER
    with pytest.raises(ProtocolError, match="not expected here"):
        decode(encode(message), wrong)


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=200))
@settings(max_examples=50, deadline=None)
def test_tokens_travel_as_int32_beside_the_body(tokens: list[int]) -> None:
    message = GrantRequest(**ONE, arrival_order=0, sampling=SAMPLING, token_ids=tuple(tokens))
    frames = encode(message)
    assert [len(frame) for frame in frames] == [
        len(encode(message.model_copy(update={"token_ids": ()}))[0]),
        4 * len(tokens),
    ]
    assert decode(frames, FROM_ROUTER) == message


def test_a_long_prompt_fits_although_the_body_is_bounded() -> None:
    message = GrantRequest(**ONE, arrival_order=0, sampling=SAMPLING, token_ids=tuple(range(200_000)))
    assert decode(encode(message), FROM_ROUTER) == message


def test_the_largest_report_of_a_decode_step_fits() -> None:
    """32 sequences with 20 log-probabilities each, twice (the first report repeats the first token)."""
    token = SampledToken(token=2**31 - 1, logprob=-1e-9, top=tuple((2**31 - 1, -1e-9) for _ in range(20)))
    stages = DecodeStages(since_last_kv_s=1e-9, prefill=STAGES)
    sequence = SequenceTokens(request_id="r" * 24, attempt=2**31, position=2**20, tokens=(token, token), stages=stages)
    encode(Tokens(sequences=(sequence,) * 32, num_free_blocks=2**31))


def test_the_largest_report_of_scores_fits() -> None:
    """As many tokens as a message may have, with 20 alternatives each."""
    token = SampledToken(token=2**31 - 1, logprob=-1e-9, top=tuple((2**31 - 1, -1e-9) for _ in range(20)))
    scores = PromptScores(request_id="r" * 128, attempt=2**31, position=2**20, tokens=(token,) * MAX_SCORES_PER_MESSAGE)
    assert len(encode(scores)[0]) < MAX_BODY_BYTES


def test_a_full_renewal_fits() -> None:
    keys = tuple((f"{i:024d}", 2**31) for i in range(512))
    encode(Renew(requests=keys[:256], prefilled=keys[256:]))
    encode(Unknown(requests=keys))


def test_a_body_beyond_the_limit_is_not_sent() -> None:
    too_many = Unknown(requests=tuple(("x" * 128, i) for i in range(1000)))
    with pytest.raises(ProtocolError, match=f"allowed are {MAX_BODY_BYTES}"):
        encode(too_many)


def test_a_body_beyond_the_limit_is_not_read() -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        decode([body("Welcome", {"router_incarnation": "x" * MAX_BODY_BYTES})], FROM_ROUTER)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -1])
def test_another_version_is_named(version: int) -> None:
    with pytest.raises(ProtocolError, match=f"version {version}, this process speaks {PROTOCOL_VERSION}"):
        decode([body("Introduce", {}, version)], FROM_ROUTER)


GOOD = encode(SAMPLES[12])[0]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\x93" + VERSION],
        [body("Introduce", {}) + b"\x00"],
        [body("Introduce", {}), b"", b""],
        [body("Introduce", {}), b"\x00" * 4],  # takes no tokens
        [body("Nobody", {})],
        [body("", {})],
        [body(None, {})],
        [body(["Introduce"], {})],
        [body("Introduce", [])],
        [body("Introduce", None)],
        [body("Introduce", {"extra": 1})],
        [body("Introduce", {1: 2})],
        [body("Introduce", {}, "1")],
        [body("Introduce", {}, None)],
        [body("Welcome", {})],
        [body("Welcome", {"router_incarnation": ""})],
        [body("Welcome", {"router_incarnation": "x" * 129})],
        [body("Welcome", {"router_incarnation": 5})],
        [body("Welcome", {"router_incarnation": b"\xff\xfe"})],
        [b"\x93" + VERSION + b"\xa7Welcome\x81\xb2router_incarnation\xa2\xff\xfe"],  # text that is not UTF-8
        [msgpack.packb({"version": 1})],
        [msgpack.packb(1)],
        [msgpack.packb([PROTOCOL_VERSION, "Introduce"])],
        [msgpack.packb([PROTOCOL_VERSION, "Introduce", {}, {}])],
        [GOOD, b"\x00" * 5],
        [GOOD, b"\x05\x00\x00\x00\xff\xff\xff\xff"],  # a token below 0
        [GOOD, b"\x00" * (MAX_TOKEN_FRAME_BYTES + 4)],
    ],
)
def test_anything_else_is_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames, FROM_ROUTER)


@pytest.mark.parametrize("code", [0, 5, 127])
def test_extension_types_are_refused(code: int) -> None:
    extension = msgpack.ExtType(code, b"\x00" * 8)
    with pytest.raises(ProtocolError):
        decode([body("Welcome", {"router_incarnation": extension})], FROM_ROUTER)


def test_an_extension_does_not_pass_for_a_pair() -> None:
    """msgpack's own ExtType is a tuple of two, which a (token, logprob) pair would accept."""
    sample = next(message for message in SAMPLES if isinstance(message, FirstToken))
    fields = sample.model_dump()
    assert decode([body("FirstToken", fields)], FROM_WORKER) == sample
    fields["token"]["top"] = [msgpack.ExtType(5, b"1.5")]
    with pytest.raises(ProtocolError):
        decode([body("FirstToken", fields)], FROM_WORKER)


def test_a_timestamp_is_no_name() -> None:
    """msgpack makes timestamps by itself, past our hook."""
    packed = b"\x93" + VERSION + b"\xa7Welcome\x81\xb2router_incarnation\xd6\xff\x00\x00\x00\x01"
    with pytest.raises(ProtocolError):
        decode([packed], FROM_ROUTER)


@pytest.mark.parametrize("depth", [100, 600, 1000, 1020, 30_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"], ids=["arrays", "maps"])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_deep_nesting_is_only_a_protocol_error(depth: int, opening: bytes, place: int) -> None:
    """Regression: a nested value where the name was due raised RecursionError into the router's loop."""
    nested = opening * depth + b"\xc0"
    parts = [VERSION, b"\xa5Hello", b"\x80" if place < 3 else b"\x81\xa3pid" + nested]
    if place < 3:
        parts[place] = nested
    with pytest.raises(ProtocolError):
        decode([b"\x93" + b"".join(parts)], FROM_WORKER)


def fuzzed_messages(count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield frames: damaged ones, ones with a value of another kind somewhere, and noise."""
    rng = random.Random(seed)
    originals = [encode(sample) for sample in SAMPLES]
    trees = [msgpack.unpackb(frames[0], strict_map_key=False) for frames in originals]
    for _ in range(count):
        number, how = rng.randrange(len(SAMPLES)), rng.random()
        frames = list(originals[number])
        if how < 0.6:
            place = rng.randrange(len(frames))
            frames[place] = damaged(rng, frames[place])
        elif how < 0.9:
            frames[0] = msgpack.packb(with_one_hostile(rng, trees[number]))
        else:
            frames = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(4))]
        yield frames


@pytest.mark.parametrize(
    "count", [100_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_fuzzed_messages_are_read_or_refused_and_nothing_else(count: int) -> None:
    """Whatever is accepted is a valid message, everything else is a ProtocolError, and nothing takes long."""

    def read(frames: list[bytes]) -> None:
        assert type(decode(frames, KINDS)) in KINDS.values()

    num_all, num_refused = count_refused(read, fuzzed_messages(count, seed=20), (ProtocolError,))
    assert num_all == count
    assert 0.3 * count < num_refused < count


def test_bodies_of_full_size_stay_small_and_quick() -> None:
    """As many empty maps, lists and nested headers as the limit lets in: what msgpack makes most of."""
    fill = MAX_BODY_BYTES - 16
    heads = [b"\x93" + VERSION + b"\xa5Renew", b""]
    fillings = [b"\x80" * fill, b"\x90" * fill, b"\xc0" * fill, b"\xa1x" * (fill // 2), b"\x81\xa1k" * (fill // 3)]
    arrays = [b"\xdc" + fill.to_bytes(2, "big") + filling for filling in fillings]
    claims = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x0f\x42\x40" * 400]
    bodies = [head + value for head in heads for value in (*fillings, *arrays, *claims)]
    assert_small(lambda body: decode([body[:MAX_BODY_BYTES]], KINDS), bodies, (ProtocolError,))


@given(data=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_only_a_protocol_error(data: bytes) -> None:
    for frames in ([data], [data, data], [body("GrantRequest", {}), data]):
        with pytest.raises(ProtocolError):
            decode(frames, KINDS)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (SamplingParams, {"temperature": float("nan")}),
        (SamplingParams, {"temperature": float("inf")}),
        (SamplingParams, {"max_tokens": 0}),
        (SamplingParams, {"logit_bias": {-1: 0.0}}),
        (SamplingParams, {"logit_bias": {1: float("nan")}}),
        (SamplingParams, {"logit_bias": {1: 100.5}}),
        (SamplingParams, {"num_logprobs": 21}),
        (SampledToken, {"token": -1}),
        (SampledToken, {"token": 2**31}),
        (KVLayoutInfo, {"num_layers": 0, "num_kv_heads": 1, "head_dim": 1, "dtype": "x"}),
        (Granted, {**ONE, "generation": 0, "credit_bytes": 1, "num_free_blocks": 0}),
        (Busy, {**ONE, "num_free_blocks": -1}),
        (Tokens, {"sequences": (), "num_free_blocks": 0, "more": 1}),
    ],
)
def test_fields_out_of_range_are_refused(kind: type[Message], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind(**fields)


def test_no_more_can_be_cached_than_the_prompt_has() -> None:
    """Regression: such an order ended the PROMPT worker, by a count of bytes below 0 in its report."""
    prefill = next(message for message in SAMPLES if isinstance(message, Prefill))
    fields = prefill.model_dump() | {"num_cached_tokens": 1001}
    with pytest.raises(ValidationError, match="more tokens are cached than the prompt has"):
        Prefill.model_validate(fields)
    assert Prefill.model_validate(fields | {"num_cached_tokens": 1000}).num_cached_tokens == 1000


@pytest.mark.parametrize(
    ("sampling", "greedy"),
    [
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=1e-6), True),
        (SamplingParams(top_k=1), True),
        (SamplingParams(top_p=0.0), True),
        (SamplingParams(temperature=0.1, top_k=2), False),
        (SamplingParams(), False),
    ],
)
def test_what_counts_as_greedy(sampling: SamplingParams, greedy: bool) -> None:
    assert sampling.is_greedy is greedy
