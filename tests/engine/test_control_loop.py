"""What both kinds of worker share around their cores: the loop wakes in time, and its heartbeat tells the truth."""

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from fake_router import FakeRouter
from twinpool.cluster.config import ClusterSpec, LivenessSpec
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    Heartbeat,
    Hello,
    KVLayoutInfo,
    Load,
    ModelIdentity,
    Welcome,
)
from twinpool.cluster.role import RoleArguments
from twinpool.engine.control import MAX_WAIT_S, Control

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
LOAD = Load(num_blocks=5, num_free_blocks=5)


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tp-", dir="/tmp"))  # short: a socket's path has at most 107 letters
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def router(folder: Path) -> Iterator[FakeRouter]:
    with zmq.Context() as context:
        router = FakeRouter(context, f"ipc://{folder}/control")
        yield router
        router.socket.close()


@pytest.fixture
def control(router: FakeRouter, folder: Path) -> Iterator[Control]:
    handler = signal.getsignal(signal.SIGTERM)
    spec = ClusterSpec(liveness=LivenessSpec(heartbeat_s=0.02, hung_after_s=600.0))
    arguments = RoleArguments(spec, folder, (f"ipc://{folder}/control",), "prompt-0", folder, None)
    with zmq.Context() as context:
        control = Control(arguments, context, HELLO, LOAD, set)
        yield control
        control.close()
    signal.signal(signal.SIGTERM, handler)


def join(control: Control, router: FakeRouter) -> None:
    assert list(control.messages()) == []
    name, _ = router.receive(Hello)
    router.send(WorkerId.parse(name), Welcome(router_incarnation="one"))
    deadline_s = time.monotonic() + 10.0
    while not router.socket.poll(10):  # heartbeats begin with the welcome
        assert time.monotonic() < deadline_s, "no heartbeat came"
        control.wait(False, None)
        assert list(control.messages()) == []


def beats(router: FakeRouter, number: int) -> list[int]:
    """Return the progress in the next heartbeats."""
    found = [router.receive(Heartbeat)[1] for _ in range(number)]
    return [beat.progress for beat in found if isinstance(beat, Heartbeat)]


@pytest.mark.parametrize("deadline_in_s", [None, 60.0, 0.05, -1.0])
@pytest.mark.timeout(30)
def test_the_loop_turns_in_time_although_nothing_comes(control: Control, deadline_in_s: float | None) -> None:
    """What has expired is swept by the clock: a full pool that gets no new work recovers by itself."""
    due_s = MAX_WAIT_S if deadline_in_s is None else min(deadline_in_s, MAX_WAIT_S)
    started_s = time.monotonic()
    control.wait(False, None if deadline_in_s is None else started_s + deadline_in_s)
    waited_s = time.monotonic() - started_s
    assert max(due_s, 0.0) - 0.002 <= waited_s < 20.0


def test_a_deadline_ends_the_wait_earlier_than_none(control: Control) -> None:
    """Of several waits that shall end at once at least one does, on however busy a machine."""
    waits_s: list[float] = []
    for _ in range(20):
        started_s = time.monotonic()
        control.wait(False, started_s + 0.01)
        waits_s.append(time.monotonic() - started_s)
    assert min(waits_s) < MAX_WAIT_S / 2


@pytest.mark.timeout(30)
def test_a_busy_loop_does_not_wait(control: Control) -> None:
    waits_s: list[float] = []
    for _ in range(20):
        started_s = time.monotonic()
        control.wait(True, None)
        waits_s.append(time.monotonic() - started_s)
    assert min(waits_s) < MAX_WAIT_S / 2


def test_heartbeats_go_on_while_the_loop_stands_still_and_say_so(control: Control, router: FakeRouter) -> None:
    """A loop that hangs inside a step: the router sees the same progress again and again."""
    join(control, router)
    control.turned(LOAD, is_busy=True)
    standing = beats(router, 12)[-8:]  # the first ones may be from before the turn
    assert len(set(standing)) == 1, "a loop that stands still makes no progress"
    control.moved()
    assert beats(router, 12)[-1] == standing[0] + 1, "progress inside a step counts"
