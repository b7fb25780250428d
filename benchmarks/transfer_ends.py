"""The two ends of every contestant of transfer.py: one process sends, one receives, each with one thread of compute.

An end reads commands as lines of JSON from stdin and answers each with one line on stdout: `expect` (before anything is
sent), `move` (when it began and ended), `cpu` (seconds so far), `clear` and `digest` (of the keys and values it holds).
Its first line says where it can be reached.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zmq
from numpy.typing import NDArray
from transfer_prompt import End, Prompt
from twinpool.kvtransfer.layout import KVLayout
from twinpool.kvtransfer.zmq_channel import HIGH_WATER_MESSAGES

Context = zmq.Context[zmq.Socket[bytes]]


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

    def clear(self) -> None:
        self.memory[:] = 0

    def digest(self) -> int:
        """Return a hash of all bytes, where a receiver keeps them at all."""
        return xxhash.xxh3_64_intdigest(self.memory.data)

    def pieces(self, frame_bytes: int) -> Iterator[memoryview]:
        for at, num_bytes in self.prompt.places(frame_bytes):
            yield self.memory[at : at + num_bytes].data


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
            from transfer_channels import OurReceiveEnd, OurSendEnd  # brings torch, which the others need not load

            transport = "gloo" if more == "gloo" else "zmq"
            there = given["addresses"] if more == "gloo" else [address]
            return OurSendEnd(prompt, transport, there) if is_sender else OurReceiveEnd(prompt, transport, path)
        case "NIXL" | "Mooncake":
            from transfer_others import MooncakeEnd, NixlReceiveEnd, NixlSendEnd  # where they are installed

            if kind == "Mooncake":
                return MooncakeEnd(prompt, address)
            return NixlSendEnd(prompt, address) if is_sender else NixlReceiveEnd(prompt)
        case _:
            raise SystemExit(f"no such way: {way}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["send", "receive"])
    parser.add_argument("way")
    parser.add_argument("given", type=json.loads, help="layout, num_tokens, path, addresses, keys")
    words = parser.parse_args()
    prompt = Prompt(KVLayout(**words.given["layout"]), words.given["num_tokens"])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries print
    end = open_end(words.part, words.way, prompt, words.given)
    print(json.dumps({"addresses": list(end.addresses)}), file=answers, flush=True)
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
            case "clear":
                end.clear()
            case "digest":
                answer["digest"] = end.digest()
            case _:
                raise SystemExit(f"no such command: {line}")
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
