"""What the router itself costs: real worker processes with fake engines that take no time, one router on one core.

The router has a core of its own; workers and this load generator share the other. Floors of the router, each a phase:
short requests a second, streamed chunks a second over 200 streams, 1,000 open streams, the time to the first token
that it adds at 100 requests a second, and how soon /health/live answers while prompts of 1 MB are tokenised.
The time to the first token is what is beyond the prefill and beyond what the same clients wait, at the same rate, for a
bare server in the router's place that answers everything at once.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import uvloop
from measure import print_header, spread
from twinpool.engine.fetch import fetch_model

ROUTER_CORE, OTHER_CORE = 0, 1
DONE = b"data: [DONE]"
NO_PREFILL = b'"timing": {"prefill_queue_s": 0, "prefill_s": 0}'
BARE_ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
BARE_ANSWER += b"".join(
    b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (b"data: {" + NO_PREFILL + b"}\n\n", DONE + b"\n\n", b"")
)
SLOW_SECONDS_PER_ROW = 0.001  # 1,000 open streams get a token each a second
TARGETS = {
    "requests": 400.0,
    "chunks": 8000.0,
    "streams": 1000.0,
    "ttft_p50_ms": 3.0,
    "ttft_p99_ms": 15.0,
    "health_p99_ms": 200.0,
}


@dataclass
class Client:
    """One HTTP/1.1 connection, kept alive; as little work as possible, since it shares its core with the workers."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @staticmethod
    async def connect(port: int) -> "Client":
        return Client(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a whole request; return status and body of a whole answer."""
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head[9:12]), await self.reader.readexactly(length)

    async def stream(self, request: bytes, on_data: Callable[[bytes], None]) -> None:
        """Send a request and hand every read of the streamed answer to `on_data`, up to its end."""
        self.writer.write(request)
        tail = b""
        while True:
            data = await self.reader.read(1 << 16)
            if not data:
                raise ConnectionError("the router closed a stream before its end")
            on_data(data)
            tail = (tail + data)[-64:]
            if tail.endswith(b"0\r\n\r\n") and DONE in tail:
                return

    def close(self) -> None:
        self.writer.close()


def post(body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}"
    )
    return head.encode() + b"\r\n\r\n" + payload


def short_body(seed: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    words = random.Random(seed).choices(["the", "sky", "is", "blue", "and", "so", "are", "we"], k=12)
    return {"prompt": " ".join(words), "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **fields}


async def short_requests(port: int, duration_s: float, num_clients: int = 48) -> float:
    """Return answered requests a second, closed loop, four output tokens each, not streamed."""
    num_done = 0
    end_s = time.perf_counter() + duration_s

    async def one(number: int) -> None:
        nonlocal num_done
        client = await Client.connect(port)
        while time.perf_counter() < end_s:
            status, _ = await client.ask(post(short_body(number, 4)))
            assert status == 200, status
            num_done += 1
        client.close()

    await asyncio.gather(*(one(number) for number in range(num_clients)))
    return num_done / duration_s


async def streamed_chunks(port: int, num_streams: int, num_tokens: int) -> float:
    """Return event frames a second over so many streams, from the first to the last frame."""
    counts = 0
    times_s: list[float] = []

    def count(data: bytes) -> None:
        nonlocal counts
        counts += data.count(b"data: {")
        times_s.append(time.perf_counter())

    clients = [await Client.connect(port) for _ in range(num_streams)]
    requests = [post(short_body(i, num_tokens, stream=True)) for i in range(num_streams)]
    await asyncio.gather(*(client.stream(request, count) for client, request in zip(clients, requests, strict=True)))
    for client in clients:
        client.close()
    return counts / (times_s[-1] - times_s[0])


async def open_streams(port: int, num_streams: int) -> int:
    """Open so many streams, none of which ends by itself; return how many were open at once, each with a token."""
    has_token = [asyncio.Event() for _ in range(num_streams)]

    async def hold(number: int) -> None:
        client = await Client.connect(port)
        try:
            request = post(short_body(number, 2000, stream=True))
            await client.stream(request, lambda data: has_token[number].set() if b"data: {" in data else None)
        finally:
            client.close()

    tasks = [asyncio.create_task(hold(number)) for number in range(num_streams)]
    waiting = asyncio.gather(*(event.wait() for event in has_token))
    await asyncio.wait([asyncio.ensure_future(waiting), *tasks], timeout=120, return_when=asyncio.FIRST_COMPLETED)
    num_open = sum(event.is_set() and not task.done() for event, task in zip(has_token, tasks, strict=True))
    for task in tasks:
        task.cancel()
    await asyncio.gather(waiting, *tasks, return_exceptions=True)
    return num_open


async def times_to_first_token(port: int, rate: float, duration_s: float, seed: int) -> list[float]:
    """Return the seconds to the first event of streams that come at random at `rate` a second; open loop.

    What the PROMPT worker took by its own clock, waiting included, is no time of the router's and left out.
    """
    idle: list[Client] = [await Client.connect(port) for _ in range(32)]
    taken_s: list[float] = []

    async def one(number: int) -> None:
        client = idle.pop() if idle else await Client.connect(port)
        began_s = time.perf_counter()
        first_s: list[float] = []
        answer = bytearray()

        def note(data: bytes) -> None:
            if not first_s and b"data: {" in data:
                first_s.append(time.perf_counter() - began_s)
            answer.extend(data)

        await client.stream(post(short_body(number, 4, stream=True, timing=True)), note)
        timing = json.loads(answer.split(b'"timing":')[1].split(b"}")[0] + b"}")
        taken_s.append(first_s[0] - timing["prefill_queue_s"] - timing["prefill_s"])
        idle.append(client)

    draws = random.Random(seed)
    tasks: list[asyncio.Task[None]] = []
    due_s = time.perf_counter()
    for number in range(int(rate * duration_s)):
        due_s += draws.expovariate(rate)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    for client in idle:
        client.close()
    return taken_s


async def serve_bare(port: int) -> None:
    """Answer each request on `port` with one stream, whole and at once: the floor under every router."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                writer.write(BARE_ANSWER)

    await (await asyncio.start_server(serve, "127.0.0.1", port)).serve_forever()


@contextmanager
def running_bare() -> Iterator[int]:
    """Start the bare server on the router's core; yield its port."""
    port = free_port()
    command = ["taskset", "-c", str(ROUTER_CORE), sys.executable, __file__, "--serve-bare", str(port)]
    process = subprocess.Popen(command)
    try:
        wait_listening(port)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def wait_listening(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the bare server does not listen")


async def health_while_tokenising(port: int, duration_s: float, num_clients: int = 2) -> list[float]:
    """Return the seconds that /health/live took while clients send prompts of 1 MB all the time."""
    is_over = False
    draws = random.Random(7)
    text = " ".join("".join(draws.choices("abcdefghijklmnop", k=6)) for _ in range(150_000))

    async def tokenise() -> None:
        client = await Client.connect(port)
        request = post({"prompt": text, "max_tokens": 1})
        while not is_over:
            status, body = await client.ask(request)
            assert status == 400 and b"context" in body, (status, body)
        client.close()

    busy = [asyncio.create_task(tokenise()) for _ in range(num_clients)]
    client = await Client.connect(port)
    taken_s: list[float] = []
    end_s = time.perf_counter() + duration_s
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        status, _ = await client.ask(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status == 200
        taken_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(0.02)
    is_over = True
    await asyncio.gather(*busy)
    client.close()
    return taken_s


@dataclass(frozen=True)
class Running:
    port: int
    router_pid: int

    @property
    def router_cpu_s(self) -> float:
        fields = Path(f"/proc/{self.router_pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def router_rss_mib(self) -> float:
        return int(Path(f"/proc/{self.router_pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def running_router(model_folder: Path, seconds_per_row: float = 0.0) -> Iterator[Running]:
    """Start one router and two workers as plain processes, the router on a core of its own."""
    engine = {"kind": "fake", "max_num_seqs": 1024, "num_blocks": 65536, "block_size": 16, "max_model_len": 4096}
    pool = {"num_workers": 1, "engine": engine | {"fake_seconds_per_row": seconds_per_row}}
    port = free_port()
    spec = {"served_model_name": "fake", "prompt": pool, "completion": pool, "router": {"port": port}}
    names = {"router": "router", "prompt-0": "prefill_worker", "completion-0": "decode_worker"}
    processes: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        (folder / "spec.json").write_text(json.dumps(spec))
        for name, module in names.items():
            arguments = ["--spec", str(folder / "spec.json"), "--model-folder", str(model_folder), "--name", name]
            arguments += ["--control", f"ipc://{folder}/control.sock", "--run-folder", str(folder)]
            core = ROUTER_CORE if name == "router" else OTHER_CORE
            command = ["taskset", "-c", str(core), sys.executable, "-m", f"twinpool.{module}", *arguments]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        try:
            wait_ready(port, processes, folder)
            yield Running(port, processes[0].pid)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


def wait_ready(port: int, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for process in processes:
            if process.poll() is not None:
                raise SystemExit("a process ended:\n" + "".join(path.read_text() for path in folder.glob("*.log")))
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.05)
    raise SystemExit("the router was not ready within 60 s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def show(name: str, values: list[float], unit: str, target: float, is_floor: bool) -> None:
    """Print median and spread of the repeats, and their ratio to the target."""
    ratio = statistics.median(values) / target
    word = "at least" if is_floor else "at most"
    verdict = "met" if (ratio >= 1) == is_floor or ratio == 1 else "missed"
    print(f"  {name:<34}{spread(values, unit, 1):<46} {word} {target:g}: {ratio:.2f} of it, {verdict}", flush=True)


async def run_phases(running: Running, given: argparse.Namespace) -> None:
    port, results = running.port, {key: list[float]() for key in TARGETS}
    busy: dict[str, list[float]] = {"requests": [], "chunks": []}
    floors_ms: list[float] = []
    await short_requests(port, 1.0)  # warms everything up
    for repeat in range(given.repeats):
        for key, phase in (
            ("requests", lambda: short_requests(port, given.duration)),
            ("chunks", lambda: streamed_chunks(port, 200, given.stream_tokens)),
        ):
            began_s, began_cpu_s = time.perf_counter(), running.router_cpu_s
            results[key].append(await phase())
            busy[key].append((running.router_cpu_s - began_cpu_s) / (time.perf_counter() - began_s))
        with running_bare() as bare_port:
            bare_ms = [1e3 * s for s in await times_to_first_token(bare_port, 100.0, given.duration, repeat)]
        floors_ms.append(quantile(bare_ms, 0.5))
        taken_ms = [1e3 * s for s in await times_to_first_token(port, 100.0, given.duration, repeat)]
        results["ttft_p50_ms"].append(quantile(taken_ms, 0.5) - floors_ms[-1])
        results["ttft_p99_ms"].append(quantile(taken_ms, 0.99) - floors_ms[-1])
        health_ms = [1e3 * s for s in await health_while_tokenising(port, given.duration)]
        results["health_p99_ms"].append(quantile(health_ms, 0.99))
    show("short requests", results["requests"], "/s", TARGETS["requests"], True)
    show("streamed chunks, 200 streams", results["chunks"], "/s", TARGETS["chunks"], True)
    show("added TTFT at 100/s, p50", results["ttft_p50_ms"], "ms", TARGETS["ttft_p50_ms"], False)
    show("added TTFT at 100/s, p99", results["ttft_p99_ms"], "ms", TARGETS["ttft_p99_ms"], False)
    show("/health/live beside 1 MB prompts, p99", results["health_p99_ms"], "ms", TARGETS["health_p99_ms"], False)
    print(f"  a bare server in its place, p50       {spread(floors_ms, 'ms', 1)}")
    for key, shares in busy.items():
        print(f"  the router's core was busy for {statistics.median(shares):.0%} of the time in phase {key}")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer the router uses")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--duration", type=float, default=5.0, help="seconds of each timed phase")
    parser.add_argument("--stream-tokens", type=int, default=200, help="output tokens of each of the 200 streams")
    parser.add_argument("--serve-bare", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve_bare:
        uvloop.run(serve_bare(given.serve_bare))
        return
    print_header("the router alone: fake engines that take no time, the router on one core, all else on the other")
    os.sched_setaffinity(0, {OTHER_CORE})
    folder = fetch_model(given.model)
    with running_router(folder) as running:
        uvloop.run(run_phases(running, given))
    with running_router(folder, SLOW_SECONDS_PER_ROW) as running:
        num_open = [float(uvloop.run(open_streams(running.port, 1000)))]
        show("open streams", num_open, "", TARGETS["streams"], True)
        print(f"  the router's memory with them: {running.router_rss_mib:.0f} MiB")


if __name__ == "__main__":
    main()
