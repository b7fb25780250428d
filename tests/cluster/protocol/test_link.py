"""A worker's control connection, against a plain ROUTER socket in the router's place."""

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq
from fake_router import FakeRouter
from twinpool.cluster.config import LivenessSpec
from twinpool.cluster.protocol.codec import FROM_WORKER, decode, encode
from twinpool.cluster.protocol.identity import PROTOCOL_VERSION
from twinpool.cluster.protocol.link import HEARTBEAT_SUFFIX, HELLO_AGAIN_S, REFUSED_AGAIN_S, WorkerLink
from twinpool.cluster.protocol.messages import (
    Cancel,
    Heartbeat,
    Hello,
    Introduce,
    KVLayoutInfo,
    Load,
    Message,
    ModelIdentity,
    PeerGone,
    Refused,
    Unknown,
    Welcome,
)
from zmq.utils.monitor import recv_monitor_message

Context = zmq.Context[zmq.Socket[bytes]]
LIVENESS = LivenessSpec(heartbeat_s=0.02)
HELLO = Hello(
    role="PROMPT",
    pid=1,
    host="h",
    identity=ModelIdentity(
        model="m",
        fingerprint="f",
        dtype="float32",
        layout=KVLayoutInfo(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"),
    ),
    block_size=4,
    num_blocks=5,
    max_model_len=20,
    max_num_batched_tokens=8,
    max_num_seqs=4,
)
WELCOME = Welcome(router_incarnation="one")


@pytest.fixture
def router(context: Context) -> Iterator[FakeRouter]:
    folder = Path(tempfile.mkdtemp(prefix="tp-", dir="/tmp"))  # short: a socket's path has at most 107 letters
    router = FakeRouter(context, f"ipc://{folder}/control")
    yield router
    router.socket.close()
    shutil.rmtree(folder)


@pytest.fixture
def link(context: Context, router: FakeRouter) -> Iterator[WorkerLink]:
    progress = iter(range(10**9))
    address = router.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def beat() -> Heartbeat:
        return Heartbeat(progress=next(progress), is_busy=False, load=Load(num_blocks=5, num_free_blocks=5))

    link = WorkerLink(context, address, HELLO, "prompt-0", LIVENESS, beat)
    yield link
    link.close()


def next_message(link: WorkerLink) -> Message:
    while (message := link.receive()) is None:
        assert link.socket.poll(10_000), "nothing came"
    return message


def join(router: FakeRouter, link: WorkerLink) -> None:
    link.say_hello(1000.0)
    router.receive(Hello)
    router.send(link.worker, WELCOME)
    assert next_message(link) == WELCOME


def test_hello_is_repeated_until_it_is_answered(router: FakeRouter, link: WorkerLink) -> None:
    for at_s in (1000.0, 1000.0 + HELLO_AGAIN_S - 0.01, 1000.0 + HELLO_AGAIN_S):
        link.say_hello(at_s)
    link.send(Unknown(requests=()))  # marks the end
    hellos = 0
    while True:
        identity, *frames = router.socket.recv_multipart()
        assert identity.decode() == str(link.worker)
        message = decode(frames, FROM_WORKER)
        if isinstance(message, Unknown):
            break
        assert message == HELLO
        hellos += 1
    assert hellos == 2
    assert not link.is_joined
    router.send(link.worker, WELCOME)
    assert next_message(link) == WELCOME
    assert link.is_joined
    link.say_hello(5000.0)
    link.send(Unknown(requests=(("x", 1),)))
    while isinstance(message := router.receive(Message)[1], Heartbeat):
        pass
    assert message == Unknown(requests=(("x", 1),)), "no Hello any more"


def test_heartbeats_begin_with_the_welcome_and_name_the_worker(router: FakeRouter, link: WorkerLink) -> None:
    join(router, link)
    beats = [router.receive(Heartbeat) for _ in range(3)]
    assert {identity for identity, _ in beats} == {str(link.worker) + HEARTBEAT_SUFFIX}
    progress = [beat.progress for _, beat in beats if isinstance(beat, Heartbeat)]
    assert progress == sorted(set(progress))


def test_messages_pass_both_ways_in_order(router: FakeRouter, link: WorkerLink) -> None:
    join(router, link)
    orders = [Cancel(request_id=f"r{i}", attempt=1) for i in range(50)]
    router.send(link.worker, *orders)
    assert [next_message(link) for _ in orders] == orders
    reports = [Unknown(requests=((f"r{i}", 1),)) for i in range(50)]
    for report in reports:
        link.send(report)
    assert [router.receive(Unknown)[1] for _ in reports] == reports
    assert link.receive() is None


def test_a_malformed_message_is_ignored(router: FakeRouter, link: WorkerLink) -> None:
    join(router, link)
    peer = str(link.worker).encode()
    for frames in ([b"\xc1"], [b"\x91" * 1000], encode(HELLO), [b"", b"", b""]):
        router.socket.send_multipart([peer, *frames])
    router.send(link.worker, PeerGone(worker="x/y"))
    assert next_message(link) == PeerGone(worker="x/y")


def test_introduce_makes_a_new_incarnation(router: FakeRouter, link: WorkerLink) -> None:
    """With new sockets, so that nothing meant for the old one can arrive; heartbeats follow under the new name."""
    join(router, link)
    router.receive(Heartbeat)
    old = link.worker
    router.send(old, Introduce(), Cancel(request_id="meant for the old one", attempt=1))
    assert next_message(link) == Introduce()
    assert (link.worker.name, link.worker.incarnation != old.incarnation) == (old.name, True)
    assert not link.is_joined
    link.say_hello(1000.5)
    assert router.receive(Hello) == (str(link.worker), HELLO), "at once, not after two seconds"
    router.send(link.worker, WELCOME)
    assert next_message(link) == WELCOME
    while (beat := router.receive(Heartbeat))[0] == str(old) + HEARTBEAT_SUFFIX:
        pass
    assert beat[0] == str(link.worker) + HEARTBEAT_SUFFIX


def test_introduce_before_the_welcome_changes_nothing(router: FakeRouter, link: WorkerLink) -> None:
    """It answers something that we said earlier; a second new incarnation would only cost another round."""
    link.say_hello(1000.0)
    router.receive(Hello)
    before = link.worker
    router.send(link.worker, Introduce(), WELCOME)
    assert next_message(link) == WELCOME
    assert link.worker == before


def test_a_router_of_another_version_counts_as_a_refusal(router: FakeRouter, link: WorkerLink) -> None:
    """The worker ends and says why, instead of ignoring a router that it cannot read."""
    body = msgpack.packb([PROTOCOL_VERSION + 1, "Welcome", {}])
    link.say_hello(1000.0)
    router.receive(Hello)
    router.socket.send_multipart([str(link.worker).encode(), body])
    message = next_message(link)
    assert isinstance(message, Refused)
    assert f"version {PROTOCOL_VERSION + 1}, this process speaks {PROTOCOL_VERSION}" in message.reason


def test_a_refusal_is_passed_on(router: FakeRouter, link: WorkerLink) -> None:
    link.say_hello(1000.0)
    router.receive(Hello)
    router.send(link.worker, Refused(reason="dtype"))
    assert next_message(link) == Refused(reason="dtype")
    assert not link.is_joined
    assert link.is_refused


def test_a_router_that_refused_us_is_asked_again_much_later(router: FakeRouter, link: WorkerLink) -> None:
    """Another one may have come in its place; a worker of several routers lives on meanwhile."""
    join(router, link)
    router.send(link.worker, Refused(reason="version"))
    assert next_message(link) == Refused(reason="version")
    assert not link.is_joined, "no heartbeats for a router that does not want us"
    link.say_hello(1000.0 + REFUSED_AGAIN_S - 0.01)
    link.send(Unknown(requests=()))  # marks that there was no Hello before it
    while isinstance(message := router.receive(Message)[1], Heartbeat):
        pass
    assert message == Unknown(requests=())
    link.say_hello(1000.0 + REFUSED_AGAIN_S)
    router.receive(Hello)
    router.send(link.worker, WELCOME)
    assert next_message(link) == WELCOME
    assert (link.is_joined, link.is_refused) == (True, False)


def test_a_new_router_is_told_from_the_old(router: FakeRouter, link: WorkerLink) -> None:
    answers = [link.is_new_router(Welcome(router_incarnation=name)) for name in ("one", "one", "two", "two", "one")]
    assert answers == [False, False, True, False, True]


def test_a_router_that_takes_nothing_does_not_hold_us_up(context: Context) -> None:
    """Messages beyond the queue are dropped; its Introduce will come when it is back."""
    link = WorkerLink(
        context, "ipc:///nowhere/at/all", HELLO, "prompt-0", LIVENESS, lambda: pytest.fail("a beat before the welcome")
    )
    for number in range(3000):
        link.send(Unknown(requests=(("r", number),)))
    assert link.receive() is None
    link.close()
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


@pytest.mark.slow  # four seconds: ZMQ asks every second and waits for three
def test_an_idle_connection_that_has_died_is_noticed_before_it_is_needed(context: Context) -> None:
    """The other end shakes hands and then is gone without a word, as behind a firewall that forgot us."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
    ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"ROUTER"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        link = WorkerLink(context, address, HELLO, "prompt-0", LIVENESS, lambda: pytest.fail("not joined"))
        with link.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED) as monitor:
            peer, _ = server.accept()
            with peer:
                peer.sendall(greeting + bytes([4, len(ready)]) + ready)
                events = [recv_monitor_message(monitor)["event"] for _ in range(2) if monitor.poll(15_000)]
            link.socket.disable_monitor()
        link.close()
    assert events == [zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_heartbeat_thread_is_not_survived(context: Context, router: FakeRouter) -> None:
    """Regression: the worker lived on, taken for dead by the router, and never learned of it while it was idle."""

    def beat() -> Heartbeat:
        raise OSError("no more descriptors")

    link = WorkerLink(context, router.socket.getsockopt_string(zmq.LAST_ENDPOINT), HELLO, "prompt-0", LIVENESS, beat)
    heartbeat = next(thread for thread in threading.enumerate() if thread.name == "heartbeat")
    try:
        join(router, link)
        heartbeat.join(10.0)
        with pytest.raises(RuntimeError, match="heartbeat thread"):
            link.receive()
    finally:
        link.close()
