"""What moving KV costs: each channel beside a bare copy and bare socket pairs, in the same run, with the same frames.

A prompt's keys and values go from one process to another. Ours do all that the workers do: rows are gathered from a
paged cache, checksummed, sent within the credits, checked, and scattered into a cache whose blocks lie otherwise. The
bare pairs send as many bytes in frames of the same sizes and look at none. The contestants take turns in every round; a
ratio is that of one round. The target: ours moves at least 0.7 of what the bare ZMQ pair moves over the same transport.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zmq
from measure import print_header
from transfer_prompt import Prompt
from twinpool.kvtransfer.layout import KVLayout

ENDS = str(Path(__file__).with_name("transfer_ends.py"))
FLOORS = {  # each contestant, and whom it is compared with
    "copy": None,
    "socket unix": None,
    "socket tcp": None,
    "zmq ipc": None,
    "ours ipc": "zmq ipc",
    "zmq tcp": None,
    "ours tcp": "zmq tcp",
    "ours gloo": "socket tcp",
    "zmq ipc+curve": None,
    "zmq tcp+curve": None,
    "NIXL tcp": "socket tcp",
    "Mooncake tcp": "socket tcp",
}
OTHERS = {"NIXL tcp": "nixl._api", "Mooncake tcp": "mooncake.engine"}  # where these can be imported
DROPPING = ("copy", "zmq")  # their receivers keep nothing that could be compared
TARGET = 0.7


class EndProcess:
    """One end of a contestant, driven by lines of JSON."""

    def __init__(self, part: str, way: str, given: dict[str, Any]) -> None:
        command = [sys.executable, ENDS, part, way, json.dumps(given)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"an end of a contestant ended: {self.process.args}")
        return json.loads(line)

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Figures:
    """What one contestant showed with one size of frames, a value a round."""

    gb_per_s: list[float] = field(default_factory=list[float])
    send_cpu_s: list[float] = field(default_factory=list[float])  # a GB
    receive_cpu_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class Pair:
    sender: EndProcess
    receiver: EndProcess

    def move(self, prompt: Prompt, frame_bytes: int, figures: Figures | None = None) -> None:
        ends = (self.receiver, self.sender)
        for end in ends:
            end.ask(do="expect", frame_bytes=frame_bytes)
        before_s = [end.ask(do="cpu")["cpu_s"] for end in ends]
        for end in ends:
            end.tell(do="move", frame_bytes=frame_bytes)
        received, sent = (end.answer() for end in ends)
        after_s = [end.ask(do="cpu")["cpu_s"] for end in ends]  # what was handed to a thread is sent only now
        if figures is not None:
            num_gb = prompt.num_bytes / 1e9
            figures.gb_per_s.append(num_gb / (max(sent["ended_s"], received["ended_s"]) - sent["began_s"]))
            figures.receive_cpu_s.append((after_s[0] - before_s[0]) / num_gb)
            figures.send_cpu_s.append((after_s[1] - before_s[1]) / num_gb)

    def check(self, prompt: Prompt, frame_bytes: int) -> None:
        """Move once, and assert that the receiver then holds what the sender does."""
        self.receiver.ask(do="clear")
        self.move(prompt, frame_bytes)
        assert self.sender.ask(do="digest") == self.receiver.ask(do="digest"), (
            f"{frame_bytes}: what came is not what was sent"
        )


def can_import(module: str) -> bool:
    """Try it in another process: some need libraries of the system that are not there, all of them take long."""
    command = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


@contextmanager
def running_pairs(prompt: Prompt, ways: list[str]) -> Iterator[dict[str, Pair]]:
    """Start two processes a contestant; all but two wait at any time."""
    keys = [key.decode() for key in zmq.curve_keypair()]
    with TemporaryDirectory(prefix="tp-") as folder, ExitStack() as stack:

        def start(part: str, way: str, addresses: list[str]) -> EndProcess:
            given: dict[str, Any] = {"layout": asdict(prompt.layout), "num_tokens": prompt.num_tokens}
            given |= {"path": f"{folder}/{ways.index(way)}", "addresses": addresses, "keys": keys}
            end = EndProcess(part, way, given)
            stack.callback(end.close)
            return end

        receivers = {way: start("receive", way, []) for way in ways}
        senders = {way: start("send", way, receivers[way].answer()["addresses"]) for way in ways}
        for sender in senders.values():
            sender.answer()
        yield {way: Pair(senders[way], receivers[way]) for way in ways}


def measure(prompt: Prompt, ways: list[str], frame_sizes: list[int], num_rounds: int) -> dict[int, dict[str, Figures]]:
    figures = {frame_bytes: {way: Figures() for way in ways} for frame_bytes in frame_sizes}
    with running_pairs(prompt, ways) as pairs:
        for frame_bytes in frame_sizes:
            for way, pair in pairs.items():
                check = pair.move if way.startswith(DROPPING) else pair.check
                check(prompt, frame_bytes)  # the warm-up
        for _ in range(num_rounds):
            for frame_bytes in frame_sizes:
                for way, pair in pairs.items():
                    pair.move(prompt, frame_bytes, figures[frame_bytes][way])
    return figures


def show(frame_bytes: int, figures: dict[str, Figures]) -> None:
    print(f"\n  frames of {frame_bytes >> 10} KiB: median (least to most)")
    print(f"  {'':<15}{'GB/s':<24}{'CPU s/GB: sender':<24}{'receiver':<24}ratio in the same round")
    for way, own in figures.items():
        columns = [_spread(own.gb_per_s), _spread(own.send_cpu_s), _spread(own.receive_cpu_s)]
        floor = FLOORS[way]
        ratio = "" if floor not in figures else _ratio(own.gb_per_s, figures[floor].gb_per_s, floor)
        print(f"  {way:<15}" + "".join(f"{column:<24}" for column in columns) + ratio)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _ratio(ours: list[float], floors: list[float], floor: str) -> str:
    ratios = [a / b for a, b in zip(ours, floors, strict=True)]
    return f"{_spread(ratios)} of {floor}" + (_verdict(ratios) if floor.startswith("zmq") else "")


def _verdict(ratios: list[float]) -> str:
    return f", at least {TARGET}: {'met' if statistics.median(ratios) >= TARGET else 'missed'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="of the prompt whose keys and values are moved")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--frame-kib", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=FLOORS, default=list(FLOORS), help="these contestants")
    given = parser.parse_args()
    prompt = Prompt(KVLayout(given.layers, given.kv_heads, given.head_dim, given.dtype), given.tokens)
    print_header("KV transfer: every channel beside what its transport does alone")
    print(
        f"  {given.tokens} tokens x {prompt.layout.token_bytes >> 10} KiB = {prompt.num_bytes / 2**20:.0f} MiB a move"
    )
    absent = [way for way, module in OTHERS.items() if not can_import(module)]
    ways = [way for way in given.only if way not in absent]
    for frame_bytes, figures in measure(prompt, ways, [kib << 10 for kib in given.frame_kib], given.rounds).items():
        show(frame_bytes, figures)
    print("\n" + "\n".join(f"  {way}: not installed, or what it needs is not" for way in absent))


if __name__ == "__main__":
    main()
