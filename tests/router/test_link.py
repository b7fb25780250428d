"""The router's control socket against real worker links."""

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import zmq
from twinpool.cluster.config import LivenessSpec
from twinpool.cluster.protocol.codec import FROM_ROUTER, MAX_BODY_BYTES, decode, encode
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.protocol.identity import PROTOCOL_VERSION, WorkerId
from twinpool.cluster.protocol.link import WorkerLink
from twinpool.cluster.protocol.messages import (
    GrantRequest,
    Heartbeat,
    Hello,
    Introduce,
    KVLayoutInfo,
    Load,
    Message,
    ModelIdentity,
    Refused,
    Renew,
    SamplingParams,
    Unknown,
    Welcome,
)
from twinpool.router.link import RouterLink

HELLO = Hello(
    role="COMPLETION",
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
Received = tuple[WorkerId, Message]


class Inbox:
    """A router's link, and what it has received."""

    def __init__(self, address: str) -> None:
        self.link = RouterLink(address)
        self._messages: asyncio.Queue[Received] = asyncio.Queue()
        self.link.listen(self._put)

    def _put(self, worker: WorkerId, message: Message) -> None:
        self._messages.put_nowait((worker, message))

    async def receive(self) -> Received:
        return await self._messages.get()


Talk = Callable[[Inbox, WorkerLink], Awaitable[None]]


def beat() -> Heartbeat:
    return Heartbeat(progress=1, is_busy=True, load=Load(num_blocks=5, num_free_blocks=5))


@pytest.fixture
def address() -> Iterator[str]:
    """A place for a control socket; afterwards no thread and no descriptor may be left."""
    asyncio.run(asyncio.sleep(0))
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    folder = Path(tempfile.mkdtemp(prefix="tp-", dir="/tmp"))
    yield f"ipc://{folder}/control"
    shutil.rmtree(folder)
    assert set(threading.enumerate()) <= threads, "a thread was left behind"
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "a descriptor was left behind"


def with_links(address: str, talk: Talk) -> None:
    """Run `talk` between a router's link and one worker's."""

    async def run() -> None:
        router = Inbox(address)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        worker = WorkerLink(context, address, HELLO, "completion-0", LivenessSpec(heartbeat_s=0.02), beat)
        try:
            await asyncio.wait_for(talk(router, worker), 20.0)
        finally:
            worker.close()
            router.link.close()
            context.term()

    asyncio.run(run())


async def receive(router: Inbox, kind: type[Message]) -> Received:
    while True:
        received = await router.receive()
        if isinstance(received[1], kind):
            return received


async def worker_receives(worker: WorkerLink) -> Message:
    while (message := worker.receive()) is None:
        assert await asyncio.to_thread(worker.socket.poll, 10_000), "nothing came"
    return message


async def join(router: Inbox, worker: WorkerLink) -> None:
    worker.say_hello(1000.0)
    received = await receive(router, Hello)
    assert received == (worker.worker, HELLO)
    router.link.send(worker.worker, Welcome(router_incarnation="one"))
    assert await worker_receives(worker) == Welcome(router_incarnation="one")


def test_a_worker_joins_and_beats_under_its_own_name(address: str) -> None:
    """The heartbeat thread's connection counts as the worker's."""

    async def talk(router: Inbox, worker: WorkerLink) -> None:
        await join(router, worker)
        assert await receive(router, Heartbeat) == (worker.worker, beat())
        assert router.link.num_malformed == 0

    with_links(address, talk)


def test_a_worker_that_is_unknown_comes_back_as_a_new_incarnation(address: str) -> None:
    async def talk(router: Inbox, worker: WorkerLink) -> None:
        await join(router, worker)
        old = worker.worker
        router.link.send(old, Introduce())
        assert await worker_receives(worker) == Introduce()
        worker.say_hello(1000.1)
        received = await receive(router, Hello)
        assert received[0] == worker.worker != old
        assert received[0].name == old.name

    with_links(address, talk)


def test_a_long_prompt_arrives_and_the_order_is_kept(address: str) -> None:
    prompt = GrantRequest(
        request_id="r", attempt=1, arrival_order=1, sampling=SamplingParams(), token_ids=tuple(range(100_000))
    )

    async def talk(router: Inbox, worker: WorkerLink) -> None:
        await join(router, worker)
        messages = [prompt, *(Renew(requests=((f"r{i}", 1),)) for i in range(20)), prompt]
        for message in messages:
            router.link.send(worker.worker, message)
        assert [await worker_receives(worker) for _ in messages] == messages

    with_links(address, talk)


def test_a_message_that_comes_while_others_are_sent_is_noticed(address: str) -> None:
    """Regression: sending took ZMQ's one signal for what had just arrived, and the router stayed deaf to a worker."""

    async def talk(router: Inbox, worker: WorkerLink) -> None:
        worker.say_hello(1000.0)  # and no Welcome: a heartbeat would wake the router
        await receive(router, Hello)
        for number in range(10):
            waiting = asyncio.ensure_future(router.receive())
            for _ in range(5):
                await asyncio.sleep(0)  # it now waits for the socket
            message = Unknown(requests=(("r", number),))
            worker.send(message)
            for _ in range(500):  # long enough for the message to arrive meanwhile
                router.link.send(worker.worker, Renew())
            assert await asyncio.wait_for(waiting, 5.0) == (worker.worker, message)

    with_links(address, talk)


def test_a_burst_of_messages_lets_clients_be_served_in_between(address: str) -> None:
    """Regression: messages that were there already were received without a turn for anything else."""

    async def talk(router: Inbox, worker: WorkerLink) -> None:
        loop, turn, turns_of_messages = asyncio.get_running_loop(), 0, list[int]()

        def count() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(count)

        count()
        router.link.listen(lambda worker, message: turns_of_messages.append(turn))
        for number in range(200):
            worker.send(Unknown(requests=(("r", number),)))
        while len(turns_of_messages) < 200:
            await asyncio.sleep(0)
        assert len(set(turns_of_messages)) == 200

    with_links(address, talk)


@pytest.mark.parametrize(
    ("identity", "frames"),
    [
        (b"completion-9/x", [b"\xc1"]),
        (b"completion-9/x", []),
        (
            b"completion-9/x",
            [b"\x93" + bytes([PROTOCOL_VERSION]) + b"\x91" * 1000 + b"\xc0\x80"],
        ),  # regression: RecursionError
        (b"completion-9/x", encode(Welcome(router_incarnation="x"))),  # what only a router says
        (b"no-incarnation", encode(Unknown(requests=()))),
        (b"\xff\xfe/x", encode(Unknown(requests=()))),
    ],
    ids=["garbage", "nothing", "nested", "wrong direction", "half a name", "no text"],
)
def test_a_malformed_message_is_counted_and_dropped(address: str, identity: bytes, frames: list[bytes]) -> None:
    async def talk(router: Inbox, worker: WorkerLink) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.IDENTITY, identity)
            stranger.connect(address)
            stranger.send_multipart(frames or [b""])
            worker.say_hello(1000.0)
            while router.link.num_malformed == 0:
                waiting = asyncio.ensure_future(router.receive())
                await asyncio.wait([waiting], timeout=0.2)
                if waiting.done():
                    assert waiting.result()[1] == HELLO
                    worker.send(HELLO)
                waiting.cancel()
            worker.send(HELLO)
            await receive(router, Hello)
            assert router.link.num_malformed == 1

    with_links(address, talk)


def test_a_message_larger_than_agreed_is_not_taken(address: str) -> None:
    """Its connection is closed; a worker that behaves is served."""

    async def talk(router: Inbox, worker: WorkerLink) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(address)
            stranger.send(b"x" * (MAX_BODY_BYTES + 1))
            await join(router, worker)
            assert router.link.num_malformed == 0

    with_links(address, talk)


def test_a_worker_that_connects_again_is_heard_although_its_old_connection_is_there(address: str) -> None:
    """Regression: after a router had stood still for 5 s no worker was heard any more, and none came back.

    Workers give up a silent connection and make a new one, which the router sees before the end of the old.
    """

    async def talk(router: Inbox, worker: WorkerLink) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as old, context.socket(zmq.DEALER) as new:
            for number, socket in enumerate((old, new)):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.IDENTITY, b"completion-7/x")
                socket.connect(address)
                said = Unknown(requests=((f"connection-{number}", 1),))
                socket.send_multipart(encode(said))
                assert await receive(router, Unknown) == (WorkerId("completion-7", "x"), said)
            router.link.send(WorkerId("completion-7", "x"), Introduce())
            assert await asyncio.to_thread(new.poll, 10_000)
            assert decode(new.recv_multipart(), FROM_ROUTER) == Introduce()
            old.send_multipart(encode(Unknown(requests=(("late", 1),))))  # ZMQ gives that connection a name of its own
            new.send_multipart(encode(Unknown(requests=(("in time", 1),))))
            assert await receive(router, Unknown) == (
                WorkerId("completion-7", "x"),
                Unknown(requests=(("in time", 1),)),
            )
            assert router.link.num_malformed == 0

    with_links(address, talk)


def test_a_message_to_nobody_is_no_error(address: str) -> None:
    async def talk(router: Inbox, worker: WorkerLink) -> None:
        router.link.send(WorkerId("nobody", "x"), Introduce())
        await join(router, worker)

    with_links(address, talk)


def test_the_log_names_an_unreachable_worker_once(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a restarted router answered, and logged, every message that an old incarnation had in its queue."""

    async def talk(router: Inbox, worker: WorkerLink) -> None:
        for _ in range(3):
            router.link.send(WorkerId("nobody", "x"), Introduce())
            router.link.send(WorkerId("nobody", "y"), Introduce())
        await join(router, worker)

    with caplog.at_level("INFO"):
        with_links(address, talk)
    unsent = [record.getMessage().partition(" not sent")[0] for record in caplog.records]
    assert [line for line in unsent if "nobody" in line] == ["Introduce for nobody/x", "Introduce for nobody/y"]


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.168.0.1:5", "udp://127.0.0.1:5"])
def test_an_open_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="not a loopback or ipc address") as caught:
        RouterLink(address)
    assert "hint:" in str(caught.value)


@pytest.mark.parametrize("bad", ["ipc:///nowhere/at/all", "tcp://127.0.0.1:no-port"])
def test_an_address_that_cannot_be_bound_is_named_and_nothing_is_left(address: str, bad: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot bind the control socket {bad}"):
        RouterLink(bad)


def test_a_worker_of_another_version_is_refused_by_a_message_that_names_both(address: str) -> None:
    """I7: it is not left saying Hello for ever to a router that cannot read it."""

    async def run() -> list[bytes]:
        router = Inbox(address)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, b"completion-0/i")
        stranger.connect(address)
        stranger.send(msgpack.packb([PROTOCOL_VERSION + 1, "Hello", {}]))
        reading = asyncio.create_task(router.receive())
        answer = await asyncio.to_thread(stranger.recv_multipart)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        stranger.close(linger=0)
        context.term()
        router.link.close()
        return answer

    message = decode(asyncio.run(asyncio.wait_for(run(), 10)), FROM_ROUTER)
    assert isinstance(message, Refused)
    assert f"version {PROTOCOL_VERSION + 1}, this process speaks {PROTOCOL_VERSION}" in message.reason


def test_a_connection_that_closes_is_noticed_once(address: str) -> None:
    """A process that dies closes its connections at once, long before its silence is suspicious."""

    async def run() -> None:
        router = Inbox(address)
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.IDENTITY, b"prompt-0/x")
            peer.connect(address)
            await peer_says(peer, router)
            assert not router.link.has_lost_connection()
        for _ in range(500):
            if router.link.has_lost_connection():
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("nobody noticed")
        assert not router.link.has_lost_connection()
        router.link.close()

    async def peer_says(peer: zmq.Socket[bytes], router: Inbox) -> None:
        peer.send_multipart(encode(beat()))
        await asyncio.wait_for(receive(router, Heartbeat), 20.0)

    asyncio.run(run())
