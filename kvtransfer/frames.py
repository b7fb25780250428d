"""The messages of the data channel, PROMPT worker ⇄ COMPLETION worker: a header and a payload, always two parts.

Sender → receiver on one ordered connection: KVFrame, then Done or Cancelled. Receiver → sender: Credit, Ack, Reject.
Headers carry ids and counts, never addresses or block ids; everything is validated before a byte is copied.

When the payloads go through a communicator (kvtransfer.collective_channel) the header comes as an Announce, and Join,
Exchange, Go and Leave arrange for the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgpack
import xxhash
from pydantic import Field, ValidationError

from ..cluster.protocol.errors import ProtocolError
from ..cluster.protocol.identity import PROTOCOL_VERSION
from ..cluster.protocol.messages import Message, Name, PrefillStages, SampledToken

MAX_HEADER_BYTES = 16 * 1024

Hash64 = Annotated[int, Field(ge=0, lt=2**64)]
Count = Annotated[int, Field(ge=0, le=2**40)]


class DataMessage(Message):
    """`generation` is the receiver's: it names one allocation of blocks and no other."""

    request_id: Name
    attempt: int
    generation: int = Field(ge=1)

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)


class KVFrame(DataMessage):
    """Keys and values of layers × tokens; the payload is laid out as kvtransfer.layout says."""

    layout: Hash64
    sequence: Count  # 0, 1, 2, … within a transfer
    layer_start: Count
    layer_end: Count
    token_start: Count
    token_end: Count
    num_bytes: Count
    checksum: Hash64  # xxh3 of the payload


class Done(DataMessage):
    """Everything was sent; `token` is the first output token, `position` its index among the request's outputs."""

    num_frames: Count
    digest: Hash64  # over the frames' checksums, in order
    position: Count
    token: SampledToken
    stages: PrefillStages


class Cancelled(DataMessage):
    """Nothing more will come under this generation.

    `is_finished`: the request ended at its first token, so that nobody needs the keys and values; not a failure.
    """

    is_finished: bool = False


class Credit(DataMessage):
    """So many KV bytes were verified and copied."""

    num_bytes: Count


class Ack(DataMessage):
    """Done was verified; the sender's blocks are its own again."""


class Reject(DataMessage):
    """This transfer is not wanted (unknown, stale, corrupt); the sender answers with Cancelled."""

    reason: str = Field(max_length=512)


class Announce(KVFrame):
    """A frame whose payload goes through the communicator, once the receiver has said Go."""


class Go(DataMessage):
    """The receiver waits for the payload of this frame in `communicator`; frames announced before it are not wanted."""

    communicator: Count
    sequence: Count


class CommunicatorMessage(Message):
    """`communicator` is the receiver's number; a later one replaces an earlier one."""

    communicator: Count


class Join(CommunicatorMessage):
    """Receiver → sender: build your end of this communicator."""

    transport: Name


class Exchange(CommunicatorMessage):
    """Both ways: what the two ends of a communicator have to know of each other to connect."""

    name: Name
    value: bytes = Field(max_length=8 * 1024)


class Leave(CommunicatorMessage):
    """Receiver → sender: this communicator is no longer used."""


@dataclass(frozen=True)
class Received:
    """A message from a sender, as the receiving end gives it to its worker."""

    peer: bytes
    message: Message
    payload: memoryview
    is_intact: bool  # the payload has the checksum that the header names


FROM_SENDER: dict[str, type[DataMessage]] = {cls.__name__: cls for cls in (KVFrame, Done, Cancelled)}
FROM_RECEIVER: dict[str, type[DataMessage]] = {cls.__name__: cls for cls in (Credit, Ack, Reject)}
ANNOUNCING_FROM_SENDER: dict[str, type[Message]] = {**FROM_SENDER, "Announce": Announce, "Exchange": Exchange}
ANNOUNCING_FROM_RECEIVER: dict[str, type[Message]] = {
    **FROM_RECEIVER,
    **{cls.__name__: cls for cls in (Go, Join, Exchange, Leave)},
}

AnyMessage = TypeVar("AnyMessage", bound=Message)


def checksum(payload: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def extend_digest(digest: int, frame_checksum: int) -> int:
    """Return the digest over one more frame."""
    return xxhash.xxh3_64_intdigest(frame_checksum.to_bytes(8, "little"), seed=digest)


def encode_header(message: Message) -> bytes:
    header: bytes = msgpack.packb([PROTOCOL_VERSION, type(message).__name__, message.model_dump()]) or b""
    return header


def decode_header(header: bytes | memoryview, kinds: Mapping[str, type[AnyMessage]]) -> AnyMessage:
    """Return the message in `header`, which must be one of `kinds`. Raises ProtocolError for anything else."""
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"data header of {len(header)} bytes, allowed are {MAX_HEADER_BYTES}")
    try:
        version, name, fields = msgpack.unpackb(header, ext_hook=msgpack.ExtType)
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"data protocol version {version!r}, this process speaks {PROTOCOL_VERSION}")
        return kinds[name].model_validate(fields)
    except ValidationError as error:
        raise ProtocolError(f"data header is malformed: {error.error_count()} fields are wrong") from error
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"data header of {len(header)} bytes is not a message of ours") from error
