"""Control messages as bytes: `[version, type, fields]` in msgpack, prompt tokens as a raw int32 frame beside it.

Knows no socket. A decoded message has passed pydantic validation; anything else raises ProtocolError.
"""

from typing import Any, TypeVar, cast, get_args

import msgpack
import numpy as np
from pydantic import ValidationError

from .errors import ProtocolError, VersionError
from .identity import PROTOCOL_VERSION
from .messages import FromRouter, FromWorker, Message

MAX_BODY_BYTES = 64 * 1024
MAX_TOKEN_FRAME_BYTES = 4 * 1024 * 1024  # one million tokens

M = TypeVar("M", bound=Message)

FROM_WORKER: dict[str, type[Message]] = {cls.__name__: cls for cls in get_args(FromWorker)}
FROM_ROUTER: dict[str, type[Message]] = {cls.__name__: cls for cls in get_args(FromRouter)}


def encode(message: Message) -> list[bytes]:
    """Return the frames of `message`: the body, and the token frame when the message has `token_ids`.

    Raises ProtocolError when the body would exceed MAX_BODY_BYTES.
    """
    fields = message.model_dump()
    tokens = fields.pop("token_ids", None)
    body = cast(bytes, msgpack.packb([PROTOCOL_VERSION, type(message).__name__, fields]))
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes, allowed are {MAX_BODY_BYTES} for a control message"
        )
    if tokens is None:
        return [body]
    return [body, np.asarray(tokens, dtype="<i4").tobytes()]


def decode(frames: list[bytes], kinds: dict[str, type[Message]]) -> Message:
    """Return the message in `frames`, which must be one of `kinds` (FROM_WORKER or FROM_ROUTER).

    Raises ProtocolError for anything that is not exactly such a message.
    """
    if not 1 <= len(frames) <= 2 or len(frames[0]) > MAX_BODY_BYTES:
        raise ProtocolError(f"got {len(frames)} frames, the first of {len(frames[0]) if frames else 0} bytes")
    name, fields = _unpack_body(frames[0], kinds)
    if len(frames) == 2:
        fields["token_ids"] = _unpack_tokens(frames[1])
    try:
        return kinds[name].model_validate(fields)
    except ValidationError as error:
        raise ProtocolError(f"{name} is malformed: {error.error_count()} fields are wrong") from error


def _unpack_body(body: bytes, kinds: dict[str, type[Message]]) -> tuple[str, dict[Any, Any]]:
    try:
        unpacked = msgpack.unpackb(body, strict_map_key=False, ext_hook=_refuse_extension)
        version, name, fields = unpacked
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"control message of {len(body)} bytes is not [version, type, fields] in msgpack"
        ) from error
    # A peer's values are shown only when they are plain: the repr of a deeply nested one would raise by itself.
    if not isinstance(version, int) or not isinstance(name, str) or not isinstance(fields, dict):
        raise ProtocolError(f"control message of {len(body)} bytes is not [version, type, fields] in msgpack")
    if version != PROTOCOL_VERSION:
        raise VersionError(f"protocol version {version!r}, this process speaks {PROTOCOL_VERSION}")
    if name not in kinds:
        raise ProtocolError(f"message type {name[:64]!r} is not expected here")
    return name, fields


def _unpack_tokens(frame: bytes) -> tuple[int, ...]:
    if len(frame) % 4 or len(frame) > MAX_TOKEN_FRAME_BYTES:
        raise ProtocolError(
            f"token frame of {len(frame)} bytes; allowed are whole int32s up to {MAX_TOKEN_FRAME_BYTES}"
        )
    tokens = np.frombuffer(frame, dtype="<i4")
    if tokens.size and tokens.min() < 0:
        raise ProtocolError(f"token id {tokens.min()}; none is below 0")
    return tuple(tokens.tolist())


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"msgpack extension {code} of {len(data)} bytes is not allowed")
