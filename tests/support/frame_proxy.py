"""A TCP proxy between ZMQ sockets that breaks what passes through it, from a seed, and counts what it broke.

It understands ZMTP (NULL mechanism), so that whole messages, all their frames together, are dropped, doubled, swapped
with the next one, or damaged in their last frame, the payload. Besides, a direction can be slow, late or stalled, and
connections can be cut. TCP itself loses nothing silently; what a protocol does about it all the same shows here.
"""

import asyncio
import random
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from zmtp import Message, Parser, Raw, Unit

MAX_HELD_BYTES = 256 * 1024  # of one connection's direction; beyond, the sender feels it
SOCKET_BYTES = 64 * 1024  # what the kernel may hold for us at each end
SWAP_WAIT_S = 0.05  # a message that is to be swapped waits so long for the next one


@dataclass(frozen=True)
class Faults:
    """What happens in one direction; probabilities are for each message."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    flip: float = 0.0  # one bit of the payload
    truncate: float = 0.0  # the payload loses its end
    delay_s: tuple[float, float] = (0.0, 0.0)  # drawn for each message; the order stays
    bytes_per_s: float | None = None
    messages_per_s: float | None = None
    applies_to: Callable[[Message], bool] = lambda _: True


class Direction:
    """One way through the proxy, over all its connections."""

    def __init__(self, seed: str) -> None:
        self.faults = Faults()
        self.counts: Counter[str] = Counter()  # dropped, duplicated, reordered, flipped, truncated, passed
        self.is_stalled = False
        self.watch: Callable[[Message], None] = lambda _: None  # sees what passes, right before it is written
        self._random = random.Random(seed)

    def disturb(self, message: Message) -> list[Message]:
        """Return what is to be sent instead of `message`."""
        faults = self.faults
        if not faults.applies_to(message):
            return [message]
        if self._happens(faults.drop):
            self.counts["dropped"] += 1
            return []
        if message.frames[-1]:
            message = self._damage(message, faults)
        if self._happens(faults.duplicate):
            self.counts["duplicated"] += 1
            return [message, message]
        return [message]

    def is_to_be_swapped(self, message: Message) -> bool:
        return self.faults.applies_to(message) and self._happens(self.faults.reorder)

    def delay_s(self) -> float:
        return self._random.uniform(*self.faults.delay_s)

    def seconds_for(self, unit: Unit) -> float:
        """Return how long the line is taken by `unit`."""
        by_bytes = len(unit.data) / self.faults.bytes_per_s if self.faults.bytes_per_s else 0.0
        is_counted = isinstance(unit, Message) and self.faults.applies_to(unit)
        by_count = 1 / self.faults.messages_per_s if self.faults.messages_per_s and is_counted else 0.0
        return max(by_bytes, by_count)

    def _damage(self, message: Message, faults: Faults) -> Message:
        *before, payload = message.frames
        if self._happens(faults.flip):
            self.counts["flipped"] += 1
            bit = self._random.randrange(8 * len(payload))
            damaged = bytearray(payload)
            damaged[bit // 8] ^= 1 << bit % 8
            return Message((*before, bytes(damaged)))
        if self._happens(faults.truncate):
            self.counts["truncated"] += 1
            return Message((*before, payload[: self._random.randrange(len(payload))]))
        return message

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability


class FrameProxy:
    """Listens on `address`, forwards to a port of this machine; runs in a thread of its own. Close it at the end."""

    def __init__(self, target_port: int, seed: int = 0) -> None:
        self.to_target = Direction(f"{seed} there")
        self.from_target = Direction(f"{seed} back")
        self.num_connections = 0  # ever
        self._target_port = target_port
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = _listener()
        self.port: int = self._listener.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._is_listening = threading.Event()
        self._thread.start()
        assert self._is_listening.wait(5), "the proxy does not start"

    @property
    def directions(self) -> tuple[Direction, Direction]:
        return self.to_target, self.from_target

    def stall(self, *directions: Direction) -> None:
        """Nothing passes any more, and nobody is told: not even that an end has closed. No direction: both."""
        for direction in directions or self.directions:
            direction.is_stalled = True

    def release(self, *directions: Direction) -> None:
        """Let pass what was held, in order, ends of connections included."""
        for direction in directions or self.directions:
            direction.is_stalled = False

    @contextmanager
    def stalled(self, *directions: Direction) -> Iterator[None]:
        self.stall(*directions)
        try:
            yield
        finally:
            self.release(*directions)

    def cut(self) -> None:
        """End every connection at once; new ones may be made."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        assert not self._thread.is_alive(), "the proxy's thread does not end"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accepted, sock=self._listener))
        self._loop.call_soon(self._is_listening.set)
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        self._abort_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _abort_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_target = await asyncio.open_connection(sock=await _connection(self._target_port))
        except OSError:
            writer.transport.abort()  # the target is not there, as a client sees it without a proxy
            return
        ends = (writer, to_target[1])
        self._open.update(ends)
        there = _Pump(reader, to_target[1], self.to_target)
        back = _Pump(to_target[0], writer, self.from_target)
        try:
            await asyncio.gather(there.run(), back.run(), return_exceptions=True)
        finally:
            for end in ends:
                end.transport.abort()
                self._open.discard(end)


class _Pump:
    """Moves one direction of one connection: one task reads and disturbs, one waits and writes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        self._reader, self._writer, self._direction = reader, writer, direction
        self._held: deque[tuple[float, Unit | None]] = deque()  # when to be sent, and what; None: the end
        self._num_held_bytes = 0
        self._changed = asyncio.Event()
        self._last_due_s = 0.0
        self._to_swap: Message | None = None

    async def run(self) -> None:
        reading = asyncio.ensure_future(self._read())
        try:
            await self._write()
        finally:
            reading.cancel()

    async def _read(self) -> None:
        parser = Parser()
        try:
            while data := await self._reader.read(65536):
                for unit in parser.feed(data):
                    self._take(unit)
                await self._until(lambda: self._num_held_bytes < MAX_HELD_BYTES)
        except OSError:
            pass  # reset instead of closed: the end, too
        self._put_swapped()
        self._hold(None)

    def _take(self, unit: Unit) -> None:
        if isinstance(unit, Raw):
            return self._hold(unit)
        for message in self._direction.disturb(unit):
            if self._to_swap is not None:
                self._direction.counts["reordered"] += 1
                self._hold(message)
                self._put_swapped()
            elif self._direction.is_to_be_swapped(message):
                self._to_swap = message
                asyncio.get_running_loop().call_later(SWAP_WAIT_S, self._put_swapped)
            else:
                self._hold(message)

    def _put_swapped(self) -> None:
        if self._to_swap is not None:
            message, self._to_swap = self._to_swap, None
            self._hold(message)

    def _hold(self, unit: Unit | None) -> None:
        due_s = asyncio.get_running_loop().time() + (self._direction.delay_s() if isinstance(unit, Message) else 0.0)
        self._last_due_s = max(self._last_due_s, due_s)
        self._held.append((self._last_due_s, unit))
        self._num_held_bytes += len(unit.data) if unit is not None else 0
        self._changed.set()

    async def _write(self) -> None:
        self._writer.transport.set_write_buffer_limits(high=0)
        while True:
            await self._until(lambda: bool(self._held))
            due_s, unit = self._held[0]
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
            if unit is not None:
                await asyncio.sleep(self._direction.seconds_for(unit))
            while self._direction.is_stalled:
                await asyncio.sleep(0.005)
            self._held.popleft()
            if unit is None:
                with suppress(OSError):  # the other end may have closed as well
                    self._writer.write_eof()
                return
            await self._pass_on(unit)

    async def _pass_on(self, unit: Unit) -> None:
        self._num_held_bytes -= len(unit.data)
        self._changed.set()
        if isinstance(unit, Message):
            self._direction.counts["passed"] += 1
            self._direction.watch(unit)
        self._writer.write(unit.data)
        await self._writer.drain()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def _listener() -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)  # what it accepts has the same
    listener.bind(("127.0.0.1", 0))
    return listener


async def _connection(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    return connection
