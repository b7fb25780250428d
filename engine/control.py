"""What both kinds of worker share around their cores: the control channel, the heartbeat, the waiting and the end.

Owned by the engine loop. What the heartbeat thread tells the router of that loop is replaced here as a whole each turn.
Knows no engine, no transfer and no role.
"""

import logging
import signal
import time
from collections.abc import Iterator
from types import FrameType

import zmq

from ..cluster.protocol.link import WorkerLink
from ..cluster.protocol.mailbox import Mailbox
from ..cluster.protocol.messages import Heartbeat, Hello, Introduce, Leaving, Load, Message, Refused, Welcome
from ..cluster.role import EXIT_REFUSED, RoleArguments
from .watchdog import Progress, Watchdog, end_process

log = logging.getLogger(__name__)

MAX_WAIT_S = 0.5


class Control:
    """`exit_code` is set when the loop shall end: by SIGTERM, or because the router refuses this worker."""

    def __init__(
        self, arguments: RoleArguments, context: zmq.Context[zmq.Socket[bytes]], greeting: Hello, load: Load
    ) -> None:
        self.exit_code: int | None = None
        self._beat = Heartbeat(progress=0, is_busy=False, load=load)
        self._progress = Progress()
        self._signalled: Mailbox[None] = Mailbox()
        self._link = WorkerLink(
            context, arguments.control, greeting, arguments.name, arguments.spec.liveness, self._heartbeat
        )
        self._watchdog = Watchdog(self._progress, arguments.spec.liveness.hung_after_s, end_process)
        signal.signal(signal.SIGTERM, self._on_signal)

    def wait(self, is_busy: bool, deadline_s: float | None, *sources: zmq.Socket[bytes] | int) -> None:
        """Wait for the router, a signal, any of `sources` or `deadline_s`; not at all when `is_busy`."""
        timeout_s = MAX_WAIT_S if deadline_s is None else min(MAX_WAIT_S, max(0.0, deadline_s - time.monotonic()))
        watched = [self._link.socket, self._signalled.fileno(), *sources]
        zmq.zmq_poll([(source, zmq.POLLIN) for source in watched], 0 if is_busy else int(timeout_s * 1000))

    def messages(self) -> Iterator[Message | None]:
        """Yield what the router says; None means: drop everything you hold, whoever asked for it is gone."""
        self._link.say_hello(time.monotonic())
        while (message := self._link.receive()) is not None:
            match message:
                case Refused():
                    log.error("the router refused this worker: %s", message.reason)
                    self.exit_code = EXIT_REFUSED
                case Introduce():
                    yield None
                case Welcome():
                    if self._link.is_new_router(message):
                        yield None
                case _:
                    yield message

    def send(self, message: Message) -> None:
        self._link.send(message)

    def turned(self, load: Load, is_busy: bool) -> None:
        """Note one turn of the loop, for the next heartbeat."""
        self._progress.moved()
        self._beat = Heartbeat(progress=self._progress.count, is_busy=is_busy, load=load)

    def moved(self) -> None:
        """Note progress inside a step: a long one shall not look like a hang."""
        self._progress.moved()

    def close(self) -> None:
        """Say goodbye, so that nobody has to wait for our death, and close the connection."""
        self._watchdog.close()
        if self.exit_code == 0:
            self._link.send(Leaving())
        self._link.close()

    def _heartbeat(self) -> Heartbeat:
        now = {"progress": self._progress.count, "longest_stretch_s": self._progress.longest_stretch_s}
        return self._beat.model_copy(update=now)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = 0
        self._signalled.put(None)
