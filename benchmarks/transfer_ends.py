"""The two ends of every contestant of transfer.py: one process sends, one receives, each with one thread of compute.

An end reads commands as lines of JSON from stdin and answers each with one line on stdout: `expect` (before anything is
sent), `move` (when it began and ended), `cpu` (seconds so far), `clear` and `digest` (of the keys and values it holds).
Its first line says where it can be reached.
"""

import argparse
import json
import queue
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
import zmq
from numpy.typing import NDArray
from twinpool.cluster.config import TransferSpec
from twinpool.cluster.protocol.messages import PrefillStages, SampledToken
from twinpool.engine.kv_cache import KVCache
from twinpool.kvtransfer.channel import SenderThread
from twinpool.kvtransfer.frames import Done, KVFrame
from twinpool.kvtransfer.layout import KVLayout
from twinpool.kvtransfer.receiver import Complete, Key, Receiver, ReceiverCommand, Reply, Write
from twinpool.kvtransfer.sender import Closed, FirstOutput, Sender, SenderLimits, SendFrame
from twinpool.kvtransfer.zmq_channel import HIGH_WATER_MESSAGES, Received, ZmqReceiver, ZmqSender

BLOCK_SIZE = 16
LEASE_S = 30.0
MAX_FRAMES_A_TURN = 16  # as the COMPLETION worker
STAGES = PrefillStages(queue_s=0, prefill_s=0, num_computed_tokens=0, num_kv_bytes=0, num_kv_bytes_arrived=0)
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True)
class Prompt:
    """Whose keys and values are moved."""

    layout: KVLayout
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return self.layout.token_bytes * self.num_tokens

    @lru_cache  # noqa: B019  (one prompt a process)
    def frames(self, frame_bytes: int) -> tuple[int, ...]:
        """Return the payloads' sizes, as our sender cuts them."""
        sender = Sender(self.layout, _limits(frame_bytes))
        sender.open(("r", 1), 1, 2 * self.num_bytes, 0)
        for layer in range(self.layout.num_layers):
            sender.layer_written(("r", 1), layer, range(self.num_tokens))
        sizes: list[int] = []
        while isinstance(command := sender.next_command(0.0), SendFrame):
            sizes.append(self.layout.frame_bytes(len(command.layers), len(command.tokens)))
            sender.frame_sent(command.key, sizes[-1], 0)
        return tuple(sizes)

    def block_table(self, seed: int) -> list[int]:
        """Return the blocks in a random order, as a pool that has been in use for long gives them out."""
        order = np.random.default_rng(seed).permutation(-(-self.num_tokens // BLOCK_SIZE))
        return [int(block) for block in order]


class End(Protocol):
    @property
    def addresses(self) -> Sequence[str]: ...

    def expect(self, frame_bytes: int) -> None: ...

    def move(self, frame_bytes: int) -> None: ...


class Bare:
    """What the plain ends share: as many bytes as the prompt has, in one piece of memory."""

    addresses: Sequence[str] = ()

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    @cached_property
    def memory(self) -> NDArray[np.uint8]:
        return np.full(self.prompt.num_bytes, 7, dtype=np.uint8)

    def expect(self, frame_bytes: int) -> None:
        """Cut the frames before the time runs."""
        self.prompt.frames(frame_bytes)

    def pieces(self, frame_bytes: int) -> Iterator[memoryview]:
        at = 0
        for num_bytes in self.prompt.frames(frame_bytes):
            yield self.memory[at : at + num_bytes].data
            at += num_bytes


class CopyEnd(Bare):
    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.target = np.full(prompt.num_bytes, 3, dtype=np.uint8)

    def move(self, frame_bytes: int) -> None:
        at = 0
        for piece in self.pieces(frame_bytes):
            np.copyto(self.target[at : at + piece.nbytes], piece)
            at += piece.nbytes


class NothingEnd(Bare):
    """The copy has no other end."""

    def move(self, frame_bytes: int) -> None:
        """The other process does it all."""


class SocketSendEnd(Bare):
    def __init__(self, prompt: Prompt, address: str) -> None:
        super().__init__(prompt)
        kind, _, place = address.partition("://")
        self.socket = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        self.socket.connect(place if kind == "unix" else (place.split(":")[0], int(place.split(":")[1])))

    def move(self, frame_bytes: int) -> None:
        for piece in self.pieces(frame_bytes):
            self.socket.sendall(piece)


class SocketReceiveEnd(Bare):
    """Every byte is received where it shall lie."""

    def __init__(self, prompt: Prompt, kind: str, path: Path) -> None:
        super().__init__(prompt)
        self.listener = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        self.listener.bind(str(path) if kind == "unix" else ("127.0.0.1", 0))
        self.listener.listen()
        name = self.listener.getsockname()
        self.addresses = [f"unix://{name}" if kind == "unix" else f"tcp://{name[0]}:{name[1]}"]

    @cached_property
    def socket(self) -> socket.socket:
        return self.listener.accept()[0]

    def move(self, frame_bytes: int) -> None:
        left = self.memory.data
        while left:
            left = left[self.socket.recv_into(left) :]


class ZmqSendEnd(Bare):
    """PUSH: a payload a message, lent to ZMQ as our channel does."""

    def __init__(self, prompt: Prompt, address: str, keys: Sequence[str]) -> None:
        super().__init__(prompt)
        self.socket = Context().socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        if keys:
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
            self.socket.curve_serverkey = keys[0].encode()
        self.socket.connect(address)

    def move(self, frame_bytes: int) -> None:
        for piece in self.pieces(frame_bytes):
            self.socket.send(piece, copy=False)


class ZmqReceiveEnd(Bare):
    """PULL: takes each message and drops it unread."""

    def __init__(self, prompt: Prompt, address: str, keys: Sequence[str]) -> None:
        super().__init__(prompt)
        self.socket = Context().socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        if keys:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys[0].encode(), keys[1].encode()
            self.socket.curve_server = True
        self.socket.bind(address)
        self.addresses = [self.socket.getsockopt_string(zmq.LAST_ENDPOINT)]

    def move(self, frame_bytes: int) -> None:
        for num_bytes in self.prompt.frames(frame_bytes):
            assert self.socket.recv(copy=False).buffer.nbytes == num_bytes


class Ours:
    """What both ends of our channel share: a KV cache, and the blocks of the one prompt in it."""

    addresses: Sequence[str] = ()

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.prompt = prompt
        self.num_moves = 0
        self.table = prompt.block_table(seed)
        self.cache = KVCache(prompt.layout, len(self.table), BLOCK_SIZE, torch.device("cpu"))

    def next_key(self) -> Key:
        self.num_moves += 1
        return (f"move-{self.num_moves}", 1)

    def clear(self) -> None:
        for layer in self.cache.layers:
            layer.zero_()

    def fill(self) -> None:
        """Write other bytes into every row."""
        draws = torch.Generator().manual_seed(5)
        for layer in self.cache.layers:
            flat = layer.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=draws))

    def digest(self) -> int:
        """Return a hash of the prompt's keys and values in logical order."""
        hashed = xxhash.xxh3_64()
        for layer in range(self.prompt.layout.num_layers):
            hashed.update(self.cache.gather(self.table, range(layer, layer + 1), range(self.prompt.num_tokens)))
        return hashed.intdigest()


class OurSendEnd(Ours):
    """A PROMPT worker without its engine: the sender thread gathers from the cache, all layers are there at once."""

    def __init__(self, prompt: Prompt, address: str) -> None:
        super().__init__(prompt, seed=1)
        self.address = address
        self.context = Context()
        self.closed: queue.SimpleQueue[Closed] = queue.SimpleQueue()
        self.threads: dict[int, SenderThread] = {}
        self.fill()

    def expect(self, frame_bytes: int) -> None:
        """Connect, once for each size of frames."""
        if frame_bytes not in self.threads:
            self.threads[frame_bytes] = SenderThread(
                lambda: ZmqSender(self.context, [self.address], frame_bytes, LEASE_S),
                self.prompt.layout,
                _limits(frame_bytes),
                self.cache.gather,
                self.closed.put,
                f"{frame_bytes}",
            )

    def move(self, frame_bytes: int) -> None:
        thread, key = self.threads[frame_bytes], self.next_key()
        thread.open(key, 1, TransferSpec().credit_bytes, 0, self.table)
        for layer in range(self.prompt.layout.num_layers):
            thread.layer_written(key, layer, range(self.prompt.num_tokens))
        thread.finish(key, FirstOutput(0, SampledToken(token=7), STAGES))
        closed = self.closed.get()
        assert closed == Closed(key, "acked", ""), closed


class OurReceiveEnd(Ours):
    """A COMPLETION worker without its engine: every frame is checked, scattered into the cache, and credited."""

    def __init__(self, prompt: Prompt, path: Path) -> None:
        super().__init__(prompt, seed=2)
        self.channel = ZmqReceiver(Context(), path, TransferSpec().max_frame_bytes)
        self.addresses = self.channel.addresses
        self.core = Receiver(prompt.layout, LEASE_S)

    def expect(self, frame_bytes: int) -> None:
        self.core.grant(self.next_key(), 1, range(self.prompt.num_tokens), time.monotonic())

    def move(self, frame_bytes: int) -> None:
        while len(self.core):
            self.channel.socket.poll(1000)
            for _ in range(MAX_FRAMES_A_TURN):
                received = self.channel.receive()
                if received is None:
                    break
                for command in self._handle(received):
                    self._execute(command, received)
            assert not self.core.expire(time.monotonic()), "nothing came in time"

    def _handle(self, received: Received) -> list[ReceiverCommand]:
        now = time.monotonic()
        if isinstance(received.message, KVFrame):
            return self.core.frame(received.message, received.payload.nbytes, received.is_intact, now)
        assert isinstance(received.message, Done), received.message
        return self.core.done(received.message, now)

    def _execute(self, command: ReceiverCommand, received: Received) -> None:
        match command:
            case Write():
                self.cache.scatter(self.table, command.layers, command.tokens, received.payload)
            case Reply():
                self.channel.reply(received.peer, command.message)
            case Complete():
                pass  # the core has forgotten it: the move is over
            case _:
                raise AssertionError(command)


def _limits(frame_bytes: int) -> SenderLimits:
    return SenderLimits(max_frame_bytes=frame_bytes, min_frame_bytes=frame_bytes, lease_s=LEASE_S)


def open_end(part: str, way: str, prompt: Prompt, given: dict[str, Any]) -> End:
    """Return the sender or receiver of `way`, a key of transfer.WAYS."""
    kind, _, more = way.partition(" ")
    is_sender, path = part == "send", Path(given["path"])
    address = next((a for a in given["addresses"] if a.startswith(more.split("+")[0])), "")
    match kind:
        case "copy":
            return CopyEnd(prompt) if is_sender else NothingEnd(prompt)
        case "socket":
            return SocketSendEnd(prompt, address) if is_sender else SocketReceiveEnd(prompt, more, path)
        case "zmq":
            bound = f"ipc://{path}" if more.startswith("ipc") else "tcp://127.0.0.1:*"
            keys = given["keys"] if more.endswith("curve") else []
            return ZmqSendEnd(prompt, address, keys) if is_sender else ZmqReceiveEnd(prompt, bound, keys)
        case "ours":
            return OurSendEnd(prompt, address) if is_sender else OurReceiveEnd(prompt, path)
        case _:
            raise SystemExit(f"no such way: {way}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["send", "receive"])
    parser.add_argument("way")
    parser.add_argument("given", type=json.loads, help="layout, num_tokens, path, addresses, keys")
    words = parser.parse_args()
    torch.set_num_threads(1)
    prompt = Prompt(KVLayout(**words.given["layout"]), words.given["num_tokens"])
    end = open_end(words.part, words.way, prompt, words.given)
    print(json.dumps({"addresses": list(end.addresses)}), flush=True)
    for line in sys.stdin:
        command, answer = json.loads(line), {}
        match command["do"]:
            case "expect":
                end.expect(command["frame_bytes"])
            case "move":
                answer["began_s"] = time.monotonic()
                end.move(command["frame_bytes"])
                answer["ended_s"] = time.monotonic()
            case "cpu":
                answer["cpu_s"] = time.process_time()
            case "clear" if isinstance(end, Ours):
                end.clear()
            case "digest" if isinstance(end, Ours):
                answer["digest"] = end.digest()
            case _:
                raise SystemExit(f"no such command: {line}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
