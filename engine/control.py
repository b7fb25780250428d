"""What both kinds of worker share around their cores: the control channels, the heartbeat, the waiting and the end.

One link a router. Each router knows this worker by an incarnation of its own and hears of its own requests alone; when
it goes, nothing else goes with it. Owned by the engine loop. What the heartbeat threads tell of that loop is replaced
here as a whole each turn. Knows no engine, no transfer and no role.
"""

import logging
import signal
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType

import zmq

from ..cluster.protocol.link import WorkerLink
from ..cluster.protocol.mailbox import Mailbox
from ..cluster.protocol.messages import Heartbeat, Hello, Introduce, Leaving, Load, Message, Refused, Unknown, Welcome
from ..cluster.role import EXIT_CONFIG, EXIT_REFUSED, RoleArguments
from .ownership import Orphaned, Ownership
from .watchdog import Progress, Watchdog, end_process

log = logging.getLogger(__name__)

MAX_WAIT_S = 0.5


class Control:
    """`exit_code` is set when the loop shall end: by SIGTERM, or because every router refuses this worker."""

    def __init__(
        self,
        arguments: RoleArguments,
        context: zmq.Context[zmq.Socket[bytes]],
        greeting: Hello,
        load: Load,
        held: Callable[[], Collection[str]],
    ) -> None:
        """`held` tells which requests and probes the worker's core holds."""
        self.exit_code: int | None = None
        self._beat = Heartbeat(progress=0, is_busy=False, load=load)
        self._progress = Progress()
        self._signalled: Mailbox[None] = Mailbox()
        self._watchdog = Watchdog(self._progress, arguments.spec.liveness.hung_after_s, end_process)
        self._held = held
        self._ownership = Ownership()
        self._heard = 0  # the router whose message is being handled
        self._links = [
            WorkerLink(
                context, address, greeting, arguments.name, arguments.spec.liveness, self._heartbeat, arguments.keys
            )
            for address in arguments.control
        ]
        signal.signal(signal.SIGTERM, self._on_signal)

    def wait(self, is_busy: bool, deadline_s: float | None, *sources: zmq.Socket[bytes] | int) -> None:
        """Wait for a router, a signal, any of `sources` or `deadline_s`; not at all when `is_busy`."""
        timeout_s = MAX_WAIT_S if deadline_s is None else min(MAX_WAIT_S, max(0.0, deadline_s - time.monotonic()))
        watched = [*(link.socket for link in self._links), self._signalled.fileno(), *sources]
        zmq.zmq_poll([(source, zmq.POLLIN) for source in watched], 0 if is_busy else int(timeout_s * 1000))

    def messages(self) -> Iterator[Message | Orphaned]:
        """Yield what the routers say, and what is to be dropped because its router is gone."""
        for router, link in enumerate(self._links):
            self._heard = router
            link.say_hello(time.monotonic())
            while (message := link.receive()) is not None:
                yield from self._taken(link, message)

    def send(self, message: Message) -> None:
        """Tell each router what concerns it. What one named and we do not hold, only that one wants to know."""
        parts = [(self._heard, message)] if isinstance(message, Unknown) else self._ownership.addressed(message)
        if not parts:
            log.info("nobody waits for a %s any more; %d so far", type(message).__name__, self._ownership.num_ownerless)
        for router, part in parts:
            self._links[router].send(part)

    def turned(self, load: Load, is_busy: bool) -> None:
        """Note one turn of the loop, for the next heartbeat."""
        self._progress.moved()
        self._beat = Heartbeat(progress=self._progress.count, is_busy=is_busy, load=load)
        self._ownership.prune(self._held)

    def moved(self) -> None:
        """Note progress inside a step: a long one shall not look like a hang."""
        self._progress.moved()

    def close(self) -> None:
        """Say goodbye, so that nobody has to wait for our death, and close the connections."""
        self._watchdog.close()
        for link in self._links:
            if self.exit_code == 0:
                link.send(Leaving())
        for link in self._links:
            link.close()

    def _taken(self, link: WorkerLink, message: Message) -> Iterator[Message | Orphaned]:
        match message:
            case Refused():
                log.error("the router refused this worker: %s (at %s)", message.reason, link.address)
                if all(each.is_refused for each in self._links):
                    self.exit_code = EXIT_REFUSED
                yield self._ownership.orphan(self._heard)
            case Introduce():
                yield self._ownership.orphan(self._heard)
            case Welcome():
                self._check_distinct(link, message)
                if link.is_new_router(message):
                    yield self._ownership.orphan(self._heard)
            case _:
                self._ownership.note(message, self._heard)
                yield message

    def _check_distinct(self, link: WorkerLink, welcome: Welcome) -> None:
        """A router to which two links lead would take each for the end of the other."""
        for other in self._links:
            if other is not link and other.router_incarnation == welcome.router_incarnation:
                log.error("--control %s and %s lead to the same router: name it once", other.address, link.address)
                self.exit_code = EXIT_CONFIG

    def _heartbeat(self) -> Heartbeat:
        now = {"progress": self._progress.count, "longest_stretch_s": self._progress.longest_stretch_s}
        return self._beat.model_copy(update=now)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = 0
        self._signalled.put(None)
