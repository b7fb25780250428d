"""API keys: read once, kept as hashes, compared in constant time; and the gate that asks for one.

The gate stands inside RequestFrame and before everything else: with keys, only `/health/live` is open. Without keys
everybody is let in. Whoever is let in is `scope["state"]["caller"]`.
"""

import base64
import hashlib
import hmac
import logging
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..cluster.config import RouterSpec
from ..cluster.protocol.errors import ConfigError
from .generation import ANYBODY, Caller
from .openai.errors import ErrorReply, OnError
from .quotas import Quota

KEYS_VARIABLE = "TWINPOOL_API_KEYS"
MIN_KEY_CHARACTERS = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")
OPEN_PATH = "/health/live"
PAGE_PATH = "/"  # a browser can ask for a password, not for a key
HOW = f"an entry has a name (1 to 64 of A-Z a-z 0-9 . _ -) and a key of at least {MIN_KEY_CHARACTERS} characters"

log = logging.getLogger(__name__)


class KeyEntry(BaseModel):
    """One key as an operator writes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    key: Annotated[str, Field(pattern=r"^[!-~]+$", min_length=MIN_KEY_CHARACTERS, max_length=1024)]
    weight: float = Field(1.0, gt=0, le=1000, allow_inf_nan=False)
    max_running_requests: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)

    @property
    def caller(self) -> Caller:
        return Caller(self.name, self.weight, Quota(self.max_running_requests, self.tokens_per_minute))


@dataclass(frozen=True)
class ApiKeys:
    """The keys that open the endpoint, as SHA-256 digests; none: it is open to everybody."""

    callers: Mapping[bytes, Caller]

    def caller_of(self, key: str) -> Caller | None:
        """Return whose key it is. Takes as long for a wrong key as for any right one."""
        digest = _digest(key)
        found = None
        for known, caller in self.callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        return found


NO_KEYS = ApiKeys({})


def keys_for(spec: RouterSpec, environment: Mapping[str, str]) -> ApiKeys:
    """Return the keys of a router. Raises ConfigError for wrong ones, and for a bind beyond loopback without any."""
    keys = load_keys(Path(spec.api_keys_file) if spec.api_keys_file is not None else None, environment)
    if not keys.callers and spec.host not in LOOPBACK:
        raise ConfigError(
            f"router.host {spec.host!r} is not loopback",
            hint=f"other machines may connect only with API keys: router.api_keys_file, or {KEYS_VARIABLE}",
        )
    return keys


def load_keys(file: Path | None, environment: Mapping[str, str]) -> ApiKeys:
    """Read the keys of a file, if there is one, and of TWINPOOL_API_KEYS. Raises ConfigError; never shows a key."""
    entries = [*(_read_file(file) if file is not None else ()), *_read_variable(environment.get(KEYS_VARIABLE, ""))]
    callers: dict[bytes, Caller] = {}
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise ConfigError(f"two API keys are named {entry.name!r}", hint="give each caller a name of its own")
        digest = _digest(entry.key)
        if digest in callers:
            other = callers[digest].name
            raise ConfigError(f"{entry.name!r} and {other!r} have the same API key", hint="give each its own")
        names.add(entry.name)
        callers[digest] = entry.caller
    return ApiKeys(callers)


class KeyGate:
    """ASGI middleware: lets those in who have a key, and says who they are."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, on_error: OnError) -> None:
        self._app = app
        self._keys = keys
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = ANYBODY
        if self._keys.callers and scope["path"] != OPEN_PATH:
            given = _given_key(Headers(scope=scope).get("authorization", ""))
            known = self._keys.caller_of(given) if given is not None else None
            if known is None:
                reply = _refusal(scope["path"], is_missing=given is None)
                self._on_error(scope["path"], reply)
                await reply.response()(scope, receive, send)
                return
            caller = known
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def _refusal(path: str, is_missing: bool) -> ErrorReply:
    if is_missing:
        message = "An API key is needed: send the header Authorization: Bearer KEY."
    else:
        message = "This API key is not known here."
    challenge = 'Basic realm="Twinpool", charset="UTF-8"' if path == PAGE_PATH else "Bearer"
    return ErrorReply(401, message, "invalid_api_key", headers={"www-authenticate": challenge})


def _given_key(authorization: str) -> str | None:
    """Return the key of a Bearer header, or the password of a Basic one."""
    scheme, _, credentials = authorization.strip().partition(" ")
    credentials = credentials.strip()
    if scheme.lower() == "bearer":
        return credentials or None
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(credentials, validate=True).decode()
    except ValueError:  # no Base64, no UTF-8, no ASCII
        return None
    return decoded.partition(":")[2] or None


def _read_file(file: Path) -> Sequence[KeyEntry]:
    try:
        text = file.read_text(encoding="utf-8")
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the API keys in {file}: {said}") from error
    if mode & stat.S_IROTH:
        log.warning("everybody on this machine can read the API keys in %s; chmod 600 helps", file)
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise ConfigError(f"{file} holds no API key", hint=HOW)
    if lines[0].startswith(("-", "[")):
        return _entries(_parse_yaml(text, file), str(file))
    return _entries([_pair(line, ":") for line in lines], str(file))


def _parse_yaml(text: str, file: Path) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # its words quote the file
        raise ConfigError(f"{file} is not YAML", hint=HOW) from None


def _read_variable(text: str) -> Sequence[KeyEntry]:
    pairs = [part.strip() for part in text.split(",") if part.strip()]
    return _entries([_pair(pair, "=") for pair in pairs], KEYS_VARIABLE)


def _pair(text: str, separator: str) -> dict[str, str]:
    name, _, key = text.partition(separator)
    return {"name": name.strip(), "key": key.strip()}


def _entries(data: object, source: str) -> Sequence[KeyEntry]:
    try:
        return TypeAdapter(list[KeyEntry]).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        known = [str(part) for part in first["loc"] if isinstance(part, int) or part in KeyEntry.model_fields]
        where = ".".join(known)  # an unknown field may be a key in the wrong place
        raise ConfigError(f"API keys in {source}: {where or 'the whole'}: {first['msg']}", hint=HOW) from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
