"""Key files: who a process is, and whom it knows. Made by `twinpool keys`, read once at the start of each role.

    FOLDER/router.key      secret keys, one file a holder, mode 0400: a process reads its own and no other
    FOLDER/prompt.key …
    FOLDER/allowed/prompt.pub …    public keys, one a line; more than one while keys are being changed

CURVE has nobody who signs keys: whoever is in `allowed` is let in, as the holder that the file names. A holder is
`router`, one worker (`prompt-0`), or a role (`prompt`: any PROMPT worker). A pair a role lets pools grow without new
keys; with a pair a worker, one that was broken into cannot pass for its neighbours. So both are there, and a worker
that has a public key of its own is not spoken for by its role's. Knows files and names, no sockets.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from .errors import ConfigError

HOLDER = re.compile(r"(router|prompt|completion)(-\d+)?")
ALLOWED = "allowed"
PRIVATE_BITS = 0o077  # what nobody but the owner may have of a secret key's file
KEY_CHARACTERS = 40
MAKE_HINT = "`twinpool keys FOLDER` makes a folder with all of them"


@dataclass(frozen=True)
class KeyPair:
    """Both halves in Z85, the text form of ZMQ's keys."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class PeerKeys:
    """What it takes to connect to one process: our own pair, and the public keys that it may have."""

    own: KeyPair
    allowed: tuple[bytes, ...]


@dataclass(frozen=True)
class KeyRing:
    """What one process holds: its own pair, and the public keys of all whom it may meet, by holder."""

    own: KeyPair
    known: Mapping[str, tuple[bytes, ...]]

    def keys_of(self, name: str) -> tuple[bytes, ...]:
        """Return the public keys that the process `name` may have; none: it is not known here."""
        return self.known.get(name) or self.known.get(role_of(name), ())

    def towards(self, name: str) -> PeerKeys:
        return PeerKeys(self.own, self.keys_of(name))

    def admitted(self, *roles: str) -> dict[bytes, str]:
        """Return whose key it is, for every public key of a holder of these roles."""
        return {key: holder for holder, keys in self.known.items() if role_of(holder) in roles for key in keys}

    def speaks_for(self, holder: str, name: str) -> bool:
        """Return whether who has a key of `holder` may call itself `name`."""
        return holder == (name if name in self.known else role_of(name))


def role_of(name: str) -> str:
    """Return `prompt` for `prompt-0`."""
    return name.partition("-")[0]


def load_keys(folder: Path, name: str) -> KeyRing:
    """Read what the process `name` needs. Raises ConfigError, which never shows a secret key."""
    _require_curve()
    if not HOLDER.fullmatch(name):
        raise ConfigError(
            f"a process named {name!r} has no keys", hint="names are router, router-N, prompt-N and completion-N"
        )
    known = _read_allowed(folder / ALLOWED)
    file = next((f for f in (folder / f"{name}.key", folder / f"{role_of(name)}.key") if f.exists()), None)
    if file is None:
        raise ConfigError(f"{folder} holds no key for {name}: neither {name}.key nor its role's", hint=MAKE_HINT)
    ring = KeyRing(_read_secret(file), known)
    if ring.own.public not in ring.keys_of(name):
        raise ConfigError(
            f"the public half of {file} is not among those of {name} in {folder / ALLOWED}: nobody would let it in",
            hint=f"it is {ring.own.public.decode()}",
        )
    return ring


def make_keys(folder: Path, holders: Iterable[str]) -> dict[str, str]:
    """Make a pair for each holder in a new folder; return the public keys. Raises ConfigError, and never overwrites."""
    _require_curve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not an empty folder", hint="keys are never overwritten")
    made: dict[str, str] = {}
    try:
        (folder / ALLOWED).mkdir(mode=0o700, parents=True)
        folder.chmod(0o700)
        for holder in holders:
            public, secret = zmq.curve_keypair()
            _write(folder / f"{holder}.key", secret, 0o400)
            _write(folder / ALLOWED / f"{holder}.pub", public, 0o644)
            made[holder] = public.decode()
    except OSError as error:
        raise ConfigError(f"cannot write keys into {folder}: {error.strerror}") from error
    return made


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("this libzmq was built without CURVE", hint="pip's own pyzmq wheels have it")


def _write(file: Path, key: bytes, mode: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as writer:
        writer.write(key + b"\n")


def _read_secret(file: Path) -> KeyPair:
    mode = file.stat().st_mode & 0o777
    if mode & PRIVATE_BITS:
        raise ConfigError(
            f"others can read the secret key {file}: its mode is {mode:04o}, allowed are 0400 and 0600",
            hint=f"chmod 400 {file}, and make new keys if others were on this machine",
        )
    keys = _read_keys(file)
    if len(keys) != 1:
        raise ConfigError(f"{file} holds {len(keys)} keys, allowed is one")
    return KeyPair(zmq.curve_public(keys[0]), keys[0])


def _read_allowed(folder: Path) -> dict[str, tuple[bytes, ...]]:
    """Return the public keys by holder, each key of one holder only."""
    files = sorted(folder.glob("*.pub"))
    if not files:
        raise ConfigError(f"{folder} holds no public key (*.pub)", hint=MAKE_HINT)
    known = {file.stem: _read_keys(file) for file in files}
    owners: dict[bytes, str] = {}
    for holder, keys in known.items():
        if not HOLDER.fullmatch(holder):
            raise ConfigError(
                f"{folder / holder}.pub names nobody", hint="holders are router, prompt, prompt-N and so on"
            )
        for key in keys:
            if owners.setdefault(key, holder) != holder:
                raise ConfigError(f"{holder} and {owners[key]} have the same key in {folder}", hint="give each its own")
    return known


def _read_keys(file: Path) -> tuple[bytes, ...]:
    """Return the keys of a file, one a line. `#` begins a comment: as the highest digit of Z85 it begins no key."""
    try:
        lines = [line.strip() for line in file.read_bytes().splitlines()]
    except OSError as error:
        raise ConfigError(f"cannot read the key file {file}: {error.strerror}") from error
    for i, line in enumerate(lines):
        if line and not line.startswith(b"#") and not _is_key(line):
            raise ConfigError(f"{file}, line {i + 1}: not a key", hint=f"a key is {KEY_CHARACTERS} characters of Z85")
    return tuple(dict.fromkeys(line for line in lines if _is_key(line)))


def _is_key(line: bytes) -> bool:
    if len(line) != KEY_CHARACTERS or not set(line) <= set(z85.Z85CHARS):
        return False
    try:
        return z85.encode(z85.decode(line)) == line
    except Exception:  # five characters may stand for more than four bytes hold; how that shows is pyzmq's affair
        return False
