"""What breaks a running cluster of real processes: kills at chosen moments, pauses, and links that clog.

Moments are found in what passes the proxies of a ProxiedCluster: a process is killed right before the message that
marks the moment is handed on. Signals need no proxies.
"""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import zmtp
from frame_proxy import FrameProxy
from live_cluster import LiveCluster
from proxied_cluster import ProxiedCluster, read_control, read_data
from twinpool.cluster.protocol.messages import FirstToken, Granted, Message, Prefill, Tokens
from twinpool.kvtransfer.frames import Done, KVFrame

T = TypeVar("T")
Watch = Callable[[zmtp.Message], None]

# The states of a transfer at which a PROMPT worker can die, in their order.
PROMPT_MOMENTS = ("granted", "asked", "first frame", "middle frame", "first token", "done")


@contextmanager
def paused(cluster: LiveCluster, name: str) -> Iterator[None]:
    """Stop a process, as a suspended machine or a long page-in would; its sockets stay open."""
    cluster.kill(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.kill(name, signal.SIGCONT)


def clog_and_release(proxies: list[FrameProxy], draws: random.Random, max_gap_s: float) -> None:
    """Stall all links one by one in random order, then let them go one by one in another ("swizzle-clogging")."""
    for act in (FrameProxy.stall, FrameProxy.release):
        for proxy in draws.sample(proxies, len(proxies)):
            act(proxy)
            time.sleep(draws.uniform(0.0, max_gap_s))


class KillAt:
    """Kills `victim` once, at a moment of a request that it works for."""

    def __init__(self, cluster: ProxiedCluster, victim: str, moment: str) -> None:
        self._cluster = cluster
        self._victim = victim
        self._moment = moment
        self._lock = threading.Lock()
        self._keys: set[tuple[str, int]] = set()  # of the victim's transfers
        self._killed = threading.Event()
        for name, proxy in cluster.control.items():
            proxy.to_target.watch = self._on_control(name)
            proxy.from_target.watch = self._on_control(name)
        for proxy in cluster.data.values():
            proxy.to_target.watch = self._on_data

    def among(self, ask: Callable[[], list[T]], within_s: float = 60.0) -> list[T]:
        """Ask until it has happened; return the answers among which it did. A worker that is new is given little."""
        deadline_s = time.monotonic() + within_s
        while not self._killed.is_set():
            assert time.monotonic() < deadline_s, f"the moment {self._moment!r} of {self._victim} never came"
            answers = ask()
        for proxy in self._cluster.proxies:
            proxy.to_target.watch = proxy.from_target.watch = lambda _: None
        return answers

    def _on_control(self, name: str) -> Watch:
        def watch(raw: zmtp.Message) -> None:
            message = read_control(raw)
            if name == self._victim and isinstance(message, Prefill):
                self._keys.add((message.request_id, message.attempt))
            if self._is_moment(name, message):
                self._kill()

        return watch

    def _is_moment(self, name: str, message: Message) -> bool:
        match self._moment, message:
            case "granted", Granted():
                return True  # the PROMPT worker is chosen, and does not know yet
            case "asked", Prefill():
                return name == self._victim
            case "first token", FirstToken():
                return name == self._victim
            case "streaming", Tokens():
                return name == self._victim and any(tokens.position >= 4 for tokens in message.sequences)
            case _:
                return False

    def _on_data(self, raw: zmtp.Message) -> None:
        message = read_data(raw)
        if message.key not in self._keys:
            return
        match self._moment, message:
            case ("first frame", KVFrame(sequence=0)) | ("middle frame", KVFrame(sequence=2)) | ("done", Done()):
                self._kill()

    def _kill(self) -> None:
        with self._lock:
            if not self._killed.is_set():
                self._cluster.kill(self._victim)
                self._killed.set()
