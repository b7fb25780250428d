"""A worker's control channel to several routers, each a plain socket: what each hears, and what goes when one goes."""

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import zmq
from fake_router import Context, FakeRouter
from twinpool.cluster.config import ClusterSpec, LivenessSpec
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    GrantRequest,
    Heartbeat,
    Hello,
    Introduce,
    KVLayoutInfo,
    Leaving,
    Load,
    Message,
    ModelIdentity,
    Refused,
    Renew,
    SampledToken,
    SamplingParams,
    SequenceTokens,
    Tokens,
    Unknown,
    Welcome,
)
from twinpool.cluster.role import EXIT_CONFIG, EXIT_REFUSED, RoleArguments
from twinpool.engine.control import Control
from twinpool.engine.ownership import Orphaned

SPEC = ClusterSpec(liveness=LivenessSpec(hung_after_s=600.0))  # here nobody turns the loop for the watchdog
LOAD = Load(num_blocks=5, num_free_blocks=3)
LAYOUT = KVLayoutInfo(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
HELLO = Hello(
    role="COMPLETION",
    pid=1,
    host="h",
    identity=ModelIdentity(model="m", fingerprint="f", dtype="float32", layout=LAYOUT),
    block_size=4,
    num_blocks=5,
    max_model_len=20,
    max_num_batched_tokens=8,
    max_num_seqs=4,
)


class Bench:
    """Two routers, and the control channel of one worker that serves both."""

    def __init__(self, context: Context, folder: Path) -> None:
        addresses = [f"ipc://{folder}/{name}" for name in "ab"]
        self.routers = [FakeRouter(context, address) for address in addresses]
        self.workers = list[WorkerId]()
        self.held = set[str]()
        self.is_over = False
        arguments = RoleArguments(SPEC, folder, tuple(addresses), "completion-0", folder, None)
        self.control = Control(arguments, context, HELLO, LOAD, lambda: self.held)

    def turns(self) -> Iterator[Message | Orphaned]:
        """Yield what the worker's loop is given, in turns; ends when nothing comes for long."""
        for _ in range(40):
            if self.control.exit_code is not None:
                return
            yield from self.control.messages()
            self.control.wait(False, None)

    def take(self, count: int) -> list[Message | Orphaned]:
        taken = list(islice(self.turns(), count))
        assert len(taken) == count, taken
        return taken

    def meet(self, router: int) -> WorkerId:
        """Let the worker introduce itself to that router; return the name it has there."""
        assert list(self.control.messages()) == []
        name, _ = self.routers[router].receive(Hello)
        return WorkerId.parse(name)

    def join_both(self) -> None:
        self.workers = [self.meet(i) for i in range(2)]
        for i, worker in enumerate(self.workers):
            self.routers[i].send(worker, Welcome(router_incarnation=f"router-{i}"), grant(f"of-{i}"))
        requests = [message.request_id for message in self.take(2) if isinstance(message, GrantRequest)]
        assert sorted(requests) == ["of-0", "of-1"]
        self.held |= {"of-0", "of-1"}

    def close(self) -> None:
        if not self.is_over:
            self.control.close()
        for router in self.routers:
            router.socket.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    handler, threads = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    context: Context = zmq.Context()
    folder = Path(tempfile.mkdtemp(prefix="tp-", dir="/tmp"))  # short: a socket's path has at most 107 letters
    bench = Bench(context, folder)
    yield bench
    bench.close()
    context.term()  # hangs, and so fails by the time limit, while a socket is open
    assert set(threading.enumerate()) <= threads, "a thread was left behind"
    shutil.rmtree(folder)
    signal.signal(signal.SIGTERM, handler)


def grant(request_id: str) -> GrantRequest:
    return GrantRequest(request_id=request_id, attempt=1, arrival_order=0, sampling=SamplingParams(), token_ids=(1,))


def tokens(*request_ids: str) -> Tokens:
    sampled = (SampledToken(token=1),)
    sequences = tuple(SequenceTokens(request_id=name, attempt=1, position=0, tokens=sampled) for name in request_ids)
    return Tokens(sequences=sequences, num_free_blocks=3)


def said(router: FakeRouter) -> Message:
    """Return the next message that is no heartbeat."""
    while isinstance(message := router.receive(Message)[1], Heartbeat):
        pass
    return message


def test_each_router_hears_of_its_own_requests_and_of_the_whole_load(bench: Bench) -> None:
    bench.join_both()
    assert bench.workers[0] != bench.workers[1], "each knows it by an incarnation of its own"
    assert {worker.name for worker in bench.workers} == {"completion-0"}
    bench.control.send(tokens("of-1", "of-0"))
    assert [said(router) for router in bench.routers] == [tokens("of-0"), tokens("of-1")]
    bench.control.turned(Load(num_blocks=5, num_free_blocks=1), is_busy=True)
    for router in bench.routers:
        while (beat := router.receive(Heartbeat)[1]) and isinstance(beat, Heartbeat) and beat.progress == 0:
            pass
        assert isinstance(beat, Heartbeat)
        assert beat.load.num_free_blocks == 1


def test_what_one_renews_and_the_worker_does_not_hold_only_that_one_hears(bench: Bench) -> None:
    bench.join_both()
    bench.routers[1].send(bench.workers[1], Renew(requests=(("gone", 1),)))
    for message in bench.turns():
        if isinstance(message, Renew):
            bench.control.send(Unknown(requests=message.requests))
            break
    assert said(bench.routers[1]) == Unknown(requests=(("gone", 1),))


def test_introduce_drops_what_that_router_asked_for_and_renews_that_link_alone(bench: Bench) -> None:
    bench.join_both()
    bench.routers[0].send(bench.workers[0], Introduce())
    assert bench.take(1) == [Orphaned(frozenset({"of-0"}))]
    again = bench.meet(0)
    assert (again.name, again != bench.workers[0]) == ("completion-0", True)
    bench.control.send(tokens("of-0", "of-1"))
    assert bench.routers[1].receive(Tokens) == (str(bench.workers[1]), tokens("of-1")), "under its old name"


def test_a_router_that_was_restarted_takes_its_own_requests_along(bench: Bench) -> None:
    bench.join_both()
    bench.routers[1].send(bench.workers[1], Welcome(router_incarnation="router-1-again"))
    assert bench.take(1) == [Orphaned(frozenset({"of-1"}))]


def test_a_router_that_takes_nothing_holds_up_nobody_else(bench: Bench) -> None:
    """Dead or stopped, with its queue full: the other one's tokens go out at once."""
    bench.join_both()
    for _ in range(3000):
        bench.control.send(tokens("of-0"))
    bench.control.send(tokens("of-1"))
    assert said(bench.routers[1]) == tokens("of-1")


def test_a_worker_that_one_router_refuses_serves_the_other(bench: Bench) -> None:
    bench.join_both()
    bench.routers[0].send(bench.workers[0], Refused(reason="version"))
    assert bench.take(1) == [Orphaned(frozenset({"of-0"}))]
    assert bench.control.exit_code is None
    bench.control.send(tokens("of-1"))
    assert said(bench.routers[1]) == tokens("of-1")
    bench.routers[1].send(bench.workers[1], Refused(reason="dtype"))
    assert bench.take(1) == [Orphaned(frozenset({"of-1"}))]
    assert bench.control.exit_code == EXIT_REFUSED, "nobody is left that wants it"


def test_one_router_under_two_addresses_is_an_error(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Each of the two links would end what the other one has: the worker would come and go for ever."""
    workers = [bench.meet(i) for i in range(2)]
    for router, worker in zip(bench.routers, workers, strict=True):
        router.send(worker, Welcome(router_incarnation="the same"))
    for _ in bench.turns():
        pass
    assert bench.control.exit_code == EXIT_CONFIG
    assert "lead to the same router" in caplog.text


def test_the_end_is_told_to_every_router(bench: Bench) -> None:
    bench.join_both()
    bench.control.exit_code, bench.is_over = 0, True
    bench.control.close()
    assert [said(router) for router in bench.routers] == [Leaving(), Leaving()]


def test_what_the_core_has_forgotten_is_forgotten(bench: Bench) -> None:
    """I8: the table of owners is looked through at the end of a turn, when it has grown."""
    bench.join_both()
    names = [f"r{i}" for i in range(1000)]
    for part in (names[:500], names[500:]):
        bench.routers[0].send(bench.workers[0], *(grant(name) for name in part))
        bench.take(500)
        bench.control.turned(LOAD, is_busy=True)
    bench.routers[0].send(bench.workers[0], Introduce())
    assert bench.take(1) == [Orphaned(frozenset({"of-0"}))]
