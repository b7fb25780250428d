"""The gate: whoever has an allowed key gets in, under its holder's name; whatever goes wrong, nobody else does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from twinpool.cluster.protocol.curve import DOMAIN, HANDLER_ADDRESS, Gate, holder_of, is_local, use_curve
from twinpool.cluster.protocol.keys import KeyPair, KeyRing, load_keys, make_keys
from twinpool.cluster.protocol.parts import receive_parts
from zmq.utils import z85

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
REFUSED_MS = 700  # nothing has come within it; a handshake on loopback takes a few


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    make_keys(tmp_path / "keys", ["router", "prompt", "completion-0"])
    return load_keys(tmp_path / "keys", "router")


@contextmanager
def guarded(context: Context, ring: KeyRing, *roles: str) -> Iterator[tuple[Gate, Socket, str]]:
    """Yield a gate, the socket that it guards, and the socket's address."""
    gate, socket = Gate(context, ring.admitted(*roles)), context.socket(zmq.ROUTER)
    gate.guard(socket, ring.own)
    socket.bind("tcp://127.0.0.1:*")
    try:
        yield gate, socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        socket.close(linger=0)
        gate.close()


@contextmanager
def client(context: Context, address: str, own: KeyPair | None, server_key: bytes) -> Iterator[Socket]:
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if own is not None:
            use_curve(socket, own, server_key)
        socket.connect(address)
        socket.send(b"let me in")
        yield socket


def pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def test_who_has_an_allowed_key_is_named_by_it(context: Context, tmp_path: Path, ring: KeyRing) -> None:
    with guarded(context, ring, "prompt", "completion") as (_, socket, address):
        for name, holder in (("prompt-3", "prompt"), ("completion-0", "completion-0")):
            with client(context, address, load_keys(tmp_path / "keys", name).own, ring.own.public):
                assert socket.poll(5000)
                assert [holder_of(part) for part in receive_parts(socket, 9)] == [holder, holder]


@pytest.mark.parametrize("who", ["no key", "an unknown key", "the server's own", "another role", "another server"])
def test_nobody_else_gets_in(context: Context, tmp_path: Path, ring: KeyRing, who: str) -> None:
    own = {"no key": None, "the server's own": ring.own, "an unknown key": pair()}.get(
        who, load_keys(tmp_path / "keys", "completion-0" if who == "another role" else "prompt-0").own
    )
    server_key = pair().public if who == "another server" else ring.own.public
    with guarded(context, ring, "prompt") as (gate, socket, address):
        with client(context, address, own, server_key):
            assert not socket.poll(REFUSED_MS)
        with client(context, address, load_keys(tmp_path / "keys", "prompt-0").own, ring.own.public):
            assert socket.poll(5000), "the right one is served as ever"
        gate.check()


class Deadly(str):
    """A holder whose name cannot be sent: a bug that ends the handler."""

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        raise OSError("no more memory")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_with_a_dead_handler_nobody_gets_in_and_it_is_noticed(context: Context, tmp_path: Path, ring: KeyRing) -> None:
    """It fails closed; who was let in before stays."""
    prompt, killer = load_keys(tmp_path / "keys", "prompt-0").own, pair()
    known = {**ring.known, "completion": (killer.public,)}
    deadly = KeyRing(ring.own, {Deadly(name) if name == "completion" else name: keys for name, keys in known.items()})
    with guarded(context, deadly, "prompt", "completion") as (gate, socket, address):
        with client(context, address, prompt, ring.own.public) as early:
            assert socket.poll(5000)
            receive_parts(socket, 9)
            handler = next(thread for thread in threading.enumerate() if thread.name == "gate")
            with client(context, address, killer, ring.own.public):
                handler.join(5.0)
            for own in (prompt, killer, None):
                with client(context, address, own, ring.own.public):
                    assert not socket.poll(REFUSED_MS), "somebody was let in unseen"
            early.send(b"still here")
            assert socket.poll(5000)
        with pytest.raises(RuntimeError, match="the thread that checks keys died"):
            gate.check()


def test_whatever_the_handler_is_asked_it_answers_and_lives(context: Context, tmp_path: Path, ring: KeyRing) -> None:
    """Only a complete question of this version, about this domain and CURVE, can be answered with yes."""
    key = z85.decode(load_keys(tmp_path / "keys", "prompt-0").own.public)
    right = [b"1.0", b"1", DOMAIN, b"127.0.0.1", b"", b"CURVE", key]
    wrong = [[b""], [b"1.0"], right[:6], [*right, b"more"], [b"1.0"] * 7]
    wrong += [[*right[:i], b"x", *right[i + 1 :]] for i in (0, 2, 5, 6)]
    wrong += [[*right[:5], b"NULL"], [*right[:5], b"PLAIN", b"user", b"password"]]
    with guarded(context, ring, "prompt") as (gate, _, _), context.socket(zmq.REQ) as asker:
        asker.connect(HANDLER_ADDRESS)
        for question in [*wrong, right]:
            asker.send_multipart(question)
            assert asker.poll(5000)
            version, _, status, _, holder, _ = asker.recv_multipart()
            assert (version, status, holder) == (b"1.0", *((b"200", b"prompt") if question is right else (b"400", b"")))
        gate.check()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((address, True) for address in ("ipc:///x", "inproc://x", "tcp://127.0.0.1:5", "tcp://localhost:*")),
        *((address, False) for address in ("tcp://0.0.0.0:5", "tcp://*:5", "tcp://10.0.0.1:5", "udp://127.0.0.1:5")),
        *((address, False) for address in ("tcp://127.0.0.1.example:5", "tcp://localhost.example:5", "")),
    ],
)
def test_only_what_cannot_leave_this_machine_is_local(address: str, expected: bool) -> None:
    assert is_local(address) is expected
