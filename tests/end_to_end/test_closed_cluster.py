"""A cluster with keys over TCP: it answers right, opens the documented ports, and strangers stay outside."""

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgpack
import pytest
import zmq
from closed_cluster import ClosedCluster
from listening import listening, num_descriptors, resident_bytes
from live_cluster import wait_until
from twinpool.cluster.protocol.curve import use_curve
from twinpool.cluster.protocol.identity import PROTOCOL_VERSION
from twinpool.cluster.protocol.keys import load_keys, make_keys
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260  # of the tiny models' tokenizer
FAKE = {"engine": {"kind": "fake", "num_blocks": 64}}
CUT_S = 5.0
MAX_COST_BYTES = 20 << 20
NUM_SILENT = 500
MACHINE_FACTOR = 3  # how late everything may be on a busy one
TARGETS = ("router", "completion-0")
NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
CURVE_GREETING = NULL_GREETING.replace(b"NULL\x00", b"CURVE")
READY = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"


@pytest.fixture(scope="module")
def closed(tiny_llama: Path) -> Iterator[ClosedCluster]:
    with ClosedCluster(tiny_llama, {"prompt": FAKE, "completion": FAKE}) as cluster:
        yield cluster
        answers_right(cluster)


def answers_right(cluster: ClosedCluster) -> None:
    prompt = [(i * 31) % 250 + 4 for i in range(300)]
    body = cluster.complete(prompt, max_tokens=20, ignore_eos=True, seed=1, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == expected_tokens(prompt, 20, VOCAB_SIZE, seed=1)


def target(cluster: ClosedCluster, name: str) -> tuple[int, int]:
    """Return port and pid of a process whose ZMQ port is open to the network."""
    port = cluster.control_port if name == "router" else cluster.data_ports[name]
    return port, cluster.processes[name].pid


def test_answers_are_right_and_keys_are_nowhere_but_in_their_files(closed: ClosedCluster) -> None:
    """Not in arguments, environments or logs, where others could read them."""
    answers_right(closed)
    secrets = [file.read_bytes().strip() for file in closed.keys.glob("*.key")]
    assert len(secrets) == 4
    for process in closed.processes.values():
        seen = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
        assert not [secret for secret in secrets if secret in seen]
    logs = b"".join(path.read_bytes() for path in closed.folder.glob("*.log"))
    assert logs
    assert not [secret for secret in secrets if secret in logs]


def test_only_the_documented_ports_are_open(closed: ClosedCluster) -> None:
    http = int(closed.url.rpartition(":")[2])
    ports = {name: listening(process.pid) for name, process in closed.processes.items()}
    assert ports == {
        "router": {("127.0.0.1", http), ("127.0.0.1", closed.control_port)},
        "prompt-0": set(),
        "completion-0": {("127.0.0.1", closed.data_ports["completion-0"])},
    }


@pytest.mark.parametrize("name", TARGETS)
def test_silent_clients_are_cut_and_cost_little(closed: ClosedCluster, name: str) -> None:
    """500 connections that say nothing, or only begin to: 5 s after the last one they and their descriptors are gone.

    While they are there, others are served.
    """
    port, pid = target(closed, name)
    num_before, before_bytes = num_descriptors(pid), resident_bytes(pid)
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(NUM_SILENT)]
        for client in clients[:50]:
            client.sendall(CURVE_GREETING)
        wait_until(lambda: num_descriptors(pid) > num_before + NUM_SILENT // 2, 10, "they are taken")
        answers_right(closed)
        assert resident_bytes(pid) - before_bytes < MAX_COST_BYTES
        wait_until(lambda: num_descriptors(pid) <= num_before + 5, MACHINE_FACTOR * CUT_S, "they are cut")


def is_cut(client: socket.socket, within_s: float) -> bool:
    client.settimeout(within_s)
    try:
        while client.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass  # reset by the other side
    return True


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("attack", ["endless multipart", "many parts", "oversize frame", "garbage"])
def test_whoever_has_no_key_costs_nothing_whatever_he_sends(closed: ClosedCluster, name: str, attack: str) -> None:
    """The handshake is not passed, so not one frame is kept; the connection ends."""
    part = {
        "endless multipart": b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20),  # long, and more will follow
        "many parts": b"\x01\x01x" * 20_000,
        "oversize frame": b"\x02" + (1 << 62).to_bytes(8, "big") + bytes(1 << 20),
        "garbage": os.urandom(1 << 20),
    }[attack]
    port, pid = target(closed, name)
    before_bytes = resident_bytes(pid)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(10)
        with suppress(OSError):  # cut in the middle
            client.sendall(NULL_GREETING + bytes([4, len(READY)]) + READY)
            for _ in range(50):
                client.sendall(part)
        assert is_cut(client, MACHINE_FACTOR * CUT_S)
    assert resident_bytes(pid) - before_bytes < MAX_COST_BYTES
    answers_right(closed)


@pytest.mark.parametrize("name", TARGETS)
def test_a_worker_that_has_a_key_and_sends_nonsense_is_dropped_or_cut(closed: ClosedCluster, name: str) -> None:
    """20,000 parts are one malformed message; a frame beyond the limit ends the connection."""
    ring = load_keys(closed.keys, "prompt-9")
    port, pid = target(closed, name)
    num_malformed, before_bytes = closed.status()["malformed_messages"], resident_bytes(pid)
    with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as rogue:
        rogue.setsockopt(zmq.LINGER, 0)
        rogue.setsockopt(zmq.IDENTITY, b"prompt-9/rogue/secret")
        use_curve(rogue, ring.own, ring.keys_of(name)[0])
        with rogue.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            rogue.connect(f"tcp://127.0.0.1:{port}")
            rogue.send_multipart([b"x"] * 20_000)
            rogue.send(bytes(32 << 20))
            assert monitor.poll(20_000), "the connection lives on"
            rogue.disable_monitor()
    assert resident_bytes(pid) - before_bytes < MAX_COST_BYTES
    if name == "router":
        wait_until(lambda: closed.status()["malformed_messages"] > num_malformed, 10, "the many parts are counted")
    answers_right(closed)


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


def test_a_pickle_sent_to_any_port_is_never_loaded(closed: ClosedCluster, tmp_path: Path) -> None:
    """As raw bytes, over ZMTP without and with a right key, as msgpack extension, as HTTP body."""
    path = tmp_path / "canary"
    canary = pickle.dumps(Canary(path))
    pickle.loads(canary).close()
    path.unlink()  # it works: from here on nobody may load it
    wrapped = [canary, msgpack.packb(msgpack.ExtType(42, canary)), control_body(canary), control_body(list(canary))]
    http = int(closed.url.rpartition(":")[2])
    for port in (http, closed.control_port, closed.data_ports["completion-0"]):
        send_raw(("127.0.0.1", port), canary, NULL_GREETING + canary, CURVE_GREETING + canary)
    for file in ("admin.sock", f"completion-0-{closed.processes['completion-0'].pid}.kv"):
        send_raw(str(closed.folder / file), canary, NULL_GREETING + canary)
    send_with_key(closed, wrapped)
    for kind in ("application/json", "application/octet-stream", "application/x-python-pickle"):
        for url in ("/v1/completions", "/tokenize"):
            assert closed.client.post(url, content=canary, headers={"content-type": kind}).status_code in (
                400,
                415,
                422,
            )
    answers_right(closed)
    assert not path.exists()
    assert [name for name, process in closed.processes.items() if process.poll() is not None] == []


def control_body(fields: object) -> bytes:
    body: bytes = msgpack.packb([PROTOCOL_VERSION, "Hello", {"role": fields}]) or b""
    return body


def send_raw(address: tuple[str, int] | str, *payloads: bytes) -> None:
    for payload in payloads:
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as client:
            client.settimeout(10)
            client.connect(address)
            client.sendall(payload)
            is_cut(client, 0.5)  # it is read by then, whether or not the other side cares


def send_with_key(cluster: ClosedCluster, bodies: list[bytes]) -> None:
    """Send them to both ZMQ ports as a PROMPT worker would, in every place of a message."""
    ring = load_keys(cluster.keys, "prompt-8")
    with zmq.Context() as context:
        for name in TARGETS:
            port, _ = target(cluster, name)
            with closing(context.socket(zmq.DEALER)) as socket_:
                socket_.setsockopt(zmq.LINGER, 5000)
                socket_.setsockopt(zmq.IDENTITY, b"prompt-8/canary/secret")
                use_curve(socket_, ring.own, ring.keys_of(name)[0])
                socket_.connect(f"tcp://127.0.0.1:{port}")
                for body in bodies:
                    socket_.send_multipart([body])
                    socket_.send_multipart([body, body])


@pytest.mark.parametrize("wrong", ["another worker's key", "an unknown key"])
def test_a_worker_with_a_wrong_key_does_not_join(closed: ClosedCluster, tmp_path: Path, wrong: str) -> None:
    """Its own folder says that all is well; the router's says who it is."""
    rogue = tmp_path / "rogue"
    make_keys(rogue, ["router", "prompt"])
    (rogue / "allowed" / "router.pub").write_bytes((closed.keys / "allowed" / "router.pub").read_bytes())
    if wrong == "another worker's key":
        for theirs, ours in (("completion-0.key", "prompt.key"), ("allowed/completion-0.pub", "allowed/prompt.pub")):
            (rogue / ours).chmod(0o600)
            (rogue / ours).write_bytes((closed.keys / theirs).read_bytes())
    closed.keys_of["prompt-7"] = rogue
    closed.start("prompt-7")
    process = closed.processes.pop("prompt-7")
    try:
        if wrong == "another worker's key":
            assert process.wait(60) == 3, "refused"
            log = (closed.folder / "prompt-7.log").read_text()
            assert "the key of completion-0 does not speak for 'prompt-7'" in log
        else:
            log = closed.folder / "router.log"
            wait_until(lambda: "without an allowed key" in log.read_text(), 60, "it is refused")
            assert process.poll() is None
        assert closed.worker("prompt-7") is None
    finally:
        process.kill()
        process.wait(10)
    answers_right(closed)
