"""The control socket with keys: only the right one is served, and every worker speaks for itself alone."""

import asyncio
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from twinpool.cluster.config import LivenessSpec
from twinpool.cluster.protocol.codec import FROM_ROUTER, decode, encode
from twinpool.cluster.protocol.curve import use_curve
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.protocol.identity import Role, WorkerId
from twinpool.cluster.protocol.keys import KeyPair, load_keys, make_keys
from twinpool.cluster.protocol.link import HEARTBEAT_SUFFIX, HELLO_AGAIN_S, WorkerLink
from twinpool.cluster.protocol.messages import (
    Cancel,
    Heartbeat,
    Hello,
    KVLayoutInfo,
    Load,
    Message,
    ModelIdentity,
    Refused,
    Unknown,
    Welcome,
)
from twinpool.router.link import RouterLink

Context = zmq.Context[zmq.Socket[bytes]]
HOLDERS = ["router", "prompt", "prompt-0", "completion"]
WORKER = WorkerId("prompt-0", "abcd")
UNKNOWN = Unknown(requests=())
BEAT = Heartbeat(progress=1, is_busy=False, load=Load(num_blocks=5, num_free_blocks=5))


def hello(role: Role) -> Hello:
    layout = KVLayoutInfo(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    return Hello(
        role=role,
        pid=1,
        host="h",
        identity=ModelIdentity(model="m", fingerprint="f", dtype="float32", layout=layout),
        block_size=4,
        num_blocks=5,
        max_model_len=20,
        max_num_batched_tokens=8,
        max_num_seqs=4,
    )


class Door:
    """A router's link with keys, what got through it, and clients of every kind."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        make_keys(self.keys, HOLDERS)
        self.address = f"ipc://{folder}/control"
        self.link = RouterLink(self.address, load_keys(self.keys, "router"))
        self.received: list[tuple[WorkerId, Message]] = []
        self.context: Context = zmq.Context()

    def own(self, name: str) -> KeyPair:
        return load_keys(self.keys, name).own

    @contextmanager
    def client(self, own: KeyPair | None, identity: str, *messages: Message) -> Iterator[zmq.Socket[bytes]]:
        with self.context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IDENTITY, f"{identity}/{secrets.token_hex(8)}".encode())
            if own is not None:
                use_curve(socket, own, load_keys(self.keys, "router").own.public)
            socket.connect(self.address)
            for message in messages:
                socket.send_multipart(encode(message))
            yield socket

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.01)
        pytest.fail("not within 10 s")

    async def answer(self, socket: zmq.Socket[bytes]) -> Message:
        await self.until(lambda: socket.poll(0))
        return decode(socket.recv_multipart(), FROM_ROUTER)

    def close(self) -> None:
        self.link.close()
        self.context.term()


def at_the_door(talk: Callable[[Door], Awaitable[None]]) -> None:
    """Run `talk`; afterwards no thread and no descriptor is left."""
    asyncio.run(asyncio.sleep(0))
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    folder = Path(tempfile.mkdtemp(prefix="tp-", dir="/tmp"))

    async def run() -> None:
        door = Door(folder)
        try:
            door.link.listen(lambda worker, message: door.received.append((worker, message)))
            await asyncio.wait_for(talk(door), 60.0)
        finally:
            door.close()

    try:
        asyncio.run(run())
    finally:
        shutil.rmtree(folder)
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("who", ["no key", "an unknown key", "the router's own key"])
def test_a_client_without_a_workers_key_is_not_heard(who: str) -> None:
    async def talk(door: Door) -> None:
        own = {"no key": None, "the router's own key": door.own("router")}.get(who, KeyPair(*zmq.curve_keypair()))
        with door.client(own, str(WORKER), hello("PROMPT")) as stranger:
            await asyncio.sleep(0.5)
            with door.client(door.own("prompt-0"), "prompt-0/right", hello("PROMPT")):
                await door.until(lambda: door.received)
            assert [worker.incarnation for worker, _ in door.received] == ["right"]
            assert (door.link.num_malformed, stranger.poll(0)) == (0, 0)

    at_the_door(talk)


@pytest.mark.parametrize(
    ("holder", "identity", "message", "reason"),
    [
        ("completion-0", str(WORKER), hello("PROMPT"), "the key of completion does not speak for 'prompt-0'"),
        ("prompt-1", str(WORKER), hello("PROMPT"), "the key of prompt does not speak for 'prompt-0'"),
        ("prompt-0", "prompt-1/x", hello("PROMPT"), "the key of prompt-0 does not speak for 'prompt-1'"),
        ("prompt-0", "completion-0/x", UNKNOWN, "the key of prompt-0 does not speak for 'completion-0'"),
        ("prompt-0", "router/x", BEAT, "the key of prompt-0 does not speak for 'router'"),
        ("prompt-0", str(WORKER), hello("COMPLETION"), "prompt-0 says that it is a COMPLETION worker"),
        ("completion-0", "completion-0/x", hello("PROMPT"), "completion-0 says that it is a PROMPT worker"),
    ],
)
def test_a_right_key_under_a_wrong_name_or_role_is_refused(
    holder: str, identity: str, message: Message, reason: str
) -> None:
    async def talk(door: Door) -> None:
        with door.client(door.own(holder), identity, message) as impostor:
            assert await door.answer(impostor) == Refused(reason=reason)
        assert (door.received, door.link.num_malformed) == ([], 1)

    at_the_door(talk)


def test_every_message_is_checked_not_only_the_first() -> None:
    """And what is said to an impostor's heartbeat is said to the impostor, not to the worker whose name it took."""

    async def talk(door: Door) -> None:
        heartbeat = str(WORKER) + HEARTBEAT_SUFFIX
        with door.client(door.own("prompt-0"), str(WORKER), hello("PROMPT")) as worker:
            await door.until(lambda: door.received)
            with door.client(door.own("completion-0"), heartbeat, BEAT, UNKNOWN) as impostor:
                assert isinstance(await door.answer(impostor), Refused)
                assert isinstance(await door.answer(impostor), Refused)
            worker.send_multipart(encode(UNKNOWN))
            await door.until(lambda: len(door.received) == 2)
            assert door.received == [(WORKER, hello("PROMPT")), (WORKER, UNKNOWN)]
            assert (door.link.num_malformed, worker.poll(0)) == (2, 0)

    at_the_door(talk)


def test_what_is_meant_for_a_worker_goes_to_nobody_who_takes_its_name() -> None:
    """A replayed identity: names are known to others, and ZMQ hands a connection over to whoever has its identity.

    So an identity has a secret end. Who comes under the name alone gets nothing, not even with the worker's own key.
    """

    async def talk(door: Door) -> None:
        with door.client(door.own("prompt-0"), str(WORKER), hello("PROMPT")) as worker:
            await door.until(lambda: door.received)
            for own in (door.own("prompt-0"), door.own("completion-0"), None):
                with door.client(own, str(WORKER), UNKNOWN) as other:
                    await asyncio.sleep(0.3)
                    door.link.send(WORKER, Cancel(request_id="r", attempt=1))
                    assert await door.answer(worker) == Cancel(request_id="r", attempt=1)
                    got = decode(other.recv_multipart(), FROM_ROUTER) if other.poll(0) else None
                    assert got is None or isinstance(got, Refused)

    at_the_door(talk)


@pytest.mark.parametrize("is_router_new", [False, True])
def test_a_worker_and_a_router_join_while_the_routers_key_is_being_changed(is_router_new: bool) -> None:
    """The worker knows two keys of the router and tries the one after the other."""

    async def talk(door: Door) -> None:
        other = zmq.curve_keypair()[0]
        public = door.keys / "allowed" / "router.pub"
        lines = [other, public.read_bytes().strip()]
        public.write_bytes(b"\n".join(reversed(lines) if is_router_new else lines))
        liveness = LivenessSpec(heartbeat_s=0.02)
        ring = load_keys(door.keys, "prompt-0")
        worker = WorkerLink(door.context, door.address, hello("PROMPT"), "prompt-0", liveness, lambda: BEAT, ring)
        try:
            worker.say_hello(1000.0)
            if not is_router_new:
                await asyncio.sleep(0.3)
                assert door.received == [], "with the first key it cannot have come through"
                worker.say_hello(1000.0 + HELLO_AGAIN_S)
            await door.until(lambda: door.received)
            door.link.send(worker.worker, Welcome(router_incarnation="one"))
            await door.until(worker.receive)
            await door.until(lambda: (worker.worker, BEAT) in door.received)
        finally:
            worker.close()

    at_the_door(talk)


def test_without_keys_a_router_on_another_machine_is_not_spoken_to(context: Context) -> None:
    with pytest.raises(
        ConfigError, match=r"--control tcp://10\.0\.0\.1:5 is on another machine\nhint: .*twinpool keys"
    ):
        WorkerLink(context, "tcp://10.0.0.1:5", hello("PROMPT"), "prompt-0", LivenessSpec(), lambda: BEAT)


def test_a_worker_that_does_not_know_the_routers_key_says_so(context: Context, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", HOLDERS)
    (tmp_path / "keys" / "allowed" / "router.pub").unlink()
    ring = load_keys(tmp_path / "keys", "prompt-0")
    with pytest.raises(ConfigError, match=r"no public key of the router is known\nhint: .*allowed/router\.pub"):
        WorkerLink(context, "ipc:///x", hello("PROMPT"), "prompt-0", LivenessSpec(), lambda: BEAT, ring)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:*"])
def test_with_keys_any_address_may_be_bound(address: str, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", HOLDERS)
    RouterLink(address, load_keys(tmp_path / "keys", "router")).close()
    with pytest.raises(ConfigError, match=r"hint: .*`twinpool keys"):
        RouterLink(address)


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.term()
