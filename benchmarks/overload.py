"""Goodput, refusals and a quiet caller's patience when more is asked than can be done.

Real processes with fake engines: a prefill takes a fixed time for each chunk of 64 tokens, a decode step for each row.
Requests come at random, open loop, from a loud caller at several times the capacity, and from a quiet one that stays
far below its share. Goodput counts answers whose first token came within the limit. Each request has a connection of
its own and asks for a stream; a refusal's latency runs from before the connection to its last byte.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from measure import print_header, spread
from twinpool.engine.fetch import fetch_model

from router import free_port, quantile, wait_ready

CHUNK_TOKENS = 64
NUM_PROMPT_WORKERS = 2
NUM_OUTPUT_TOKENS = 8
SLO_S, QUEUE_WAIT_S = 2.0, 1.0
LOUD_TOKENS = 128
TARGETS = {"goodput": 0.9, "rejection_p99_ms": 50.0, "quiet_ratio": 1.5}


def capacity(chunk_s: float) -> float:
    """Return how many of the loud caller's requests can be prefilled a second."""
    return NUM_PROMPT_WORKERS / (chunk_s * LOUD_TOKENS / CHUNK_TOKENS)


@dataclass
class Outcomes:
    """What became of one caller's requests."""

    ttft_s: list[float] = field(default_factory=list[float])
    refused_s: list[float] = field(default_factory=list[float])
    others: list[int] = field(default_factory=list[int])


async def ask(port: int, user: str, num_tokens: int, outcomes: Outcomes) -> None:
    prompt = random.choices(range(1000, 2000), k=num_tokens)
    body = {"prompt": prompt, "max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True, "stream": True, "user": user}
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(payload)}\r\n"
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + payload)
        status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
        if status == 200:
            await reader.readuntil(b"data: {")
            outcomes.ttft_s.append(time.perf_counter() - began_s)
        await reader.read(-1)
        if status == 503:
            outcomes.refused_s.append(time.perf_counter() - began_s)
        elif status != 200:
            outcomes.others.append(status)
    finally:
        writer.close()


async def offer(port: int, user: str, rate: float, num_tokens: int, duration_s: float, seed: int) -> Outcomes:
    """Send requests at random times, `rate` a second on average, and wait for all their ends."""
    outcomes, draws = Outcomes(), random.Random(seed)
    tasks: list[asyncio.Task[None]] = []
    due_s = began_s = time.perf_counter()
    while (due_s := due_s + draws.expovariate(rate)) < began_s + duration_s:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(port, user, num_tokens, outcomes)))
    await asyncio.gather(*tasks)
    return outcomes


def spec(port: int, chunk_s: float) -> dict[str, Any]:
    engine = {"kind": "fake", "num_blocks": 4096, "block_size": 16, "max_model_len": 2048, "max_num_seqs": 256}
    prompt = engine | {"fake_seconds_per_row": chunk_s, "max_num_batched_tokens": CHUNK_TOKENS}
    return {
        "served_model_name": "fake",
        "prompt": {"num_workers": NUM_PROMPT_WORKERS, "engine": prompt},
        "completion": {"num_workers": 1, "engine": engine | {"fake_seconds_per_row": chunk_s / 20}},
        "router": {"port": port, "max_queue_wait_s": QUEUE_WAIT_S},
    }


@contextmanager
def running_processes(model_folder: Path, chunk_s: float) -> Iterator[int]:
    """Start the router and its workers as plain processes; yield the router's port."""
    port = free_port()
    names = [*(f"prompt-{i}" for i in range(NUM_PROMPT_WORKERS)), "completion-0", "router"]
    modules = {"router": "router", "prompt": "prefill_worker", "completion": "decode_worker"}
    processes: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        (folder / "spec.json").write_text(json.dumps(spec(port, chunk_s)))
        for name in names:
            arguments = ["--spec", str(folder / "spec.json"), "--model-folder", str(model_folder), "--name", name]
            arguments += ["--control", f"ipc://{folder}/control.sock", "--run-folder", str(folder)]
            command = [sys.executable, "-m", f"twinpool.{modules[name.partition('-')[0]]}", *arguments]
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        try:
            wait_ready(port, processes, folder)
            yield port
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


async def run(port: int, given: argparse.Namespace) -> None:
    most = capacity(given.chunk_s)
    quiet_rate = given.quiet_share * most * LOUD_TOKENS / given.quiet_tokens
    factors: list[float] = given.factors
    goodput: dict[float, list[float]] = {factor: [] for factor in factors}
    refused_s: list[float] = []
    ratios: list[float] = []
    await offer(port, "loud", most, LOUD_TOKENS, 2.0, 0)
    for repeat in range(given.repeats):
        alone = await offer(port, "quiet", quiet_rate, given.quiet_tokens, 2 * given.duration, 100 + repeat)
        alone_s = quantile(alone.ttft_s, 0.99)
        for factor in factors:
            await offer(port, "loud", factor * most, LOUD_TOKENS, 3.0, 7)  # until rates and callers are known
            began_s = time.perf_counter()
            loud, quiet = await asyncio.gather(
                offer(port, "loud", factor * most, LOUD_TOKENS, given.duration, repeat),
                offer(port, "quiet", quiet_rate, given.quiet_tokens, given.duration, 100 + repeat),
            )
            took_s = time.perf_counter() - began_s
            good = [sum(ttft_s <= SLO_S for ttft_s in caller.ttft_s) for caller in (loud, quiet)]
            weighted = good[0] + good[1] * given.quiet_tokens / LOUD_TOKENS  # in requests of the loud one's size
            goodput[factor].append(weighted / given.duration)
            line = f"{factor:3.1f}x  good {goodput[factor][-1]:6.1f}/s of {most:.0f}  refused {len(loud.refused_s)}"
            if loud.refused_s:
                p50, p99 = (1e3 * quantile(loud.refused_s, share) for share in (0.5, 0.99))
                line += f" (p50 {p50:.1f} ms, p99 {p99:.1f} ms)"
            quiet_s = quantile(quiet.ttft_s, 0.99)
            line += f"  loud TTFT p99 {quantile(loud.ttft_s, 0.99):.2f} s"
            line += f"  quiet TTFT p50 {statistics.median(quiet.ttft_s):.3f} p99 {quiet_s:.3f} s, alone {alone_s:.3f} s"
            line += f"  quiet refused {len(quiet.refused_s)}, other answers {loud.others + quiet.others}"
            print(f"    {line}, {took_s:.0f} s", flush=True)
            if factor == factors[-1]:
                refused_s += loud.refused_s
                ratios.append(quiet_s / alone_s)
    report(goodput, refused_s, ratios)


def report(goodput: dict[float, list[float]], refused_s: list[float], ratios: list[float]) -> None:
    last = list(goodput)[-1]
    peak = max(statistics.median(values) for values in goodput.values())
    for factor, values in goodput.items():
        share = statistics.median(values) / peak
        print(f"  goodput at {factor:3.1f}x  {spread(values, '/s', 1)}: {share:.2f} of its peak")
    kept = statistics.median(goodput[last]) / peak
    p99_ms = 1e3 * quantile(refused_s, 0.99) if refused_s else 0.0
    quiet = statistics.median(ratios)
    for name, value, target, is_met in (
        (f"goodput at {last:g}x, of its peak", kept, TARGETS["goodput"], kept >= TARGETS["goodput"]),
        ("refusals p99, ms", p99_ms, TARGETS["rejection_p99_ms"], p99_ms <= TARGETS["rejection_p99_ms"]),
        ("quiet TTFT p99, times alone", quiet, TARGETS["quiet_ratio"], quiet <= TARGETS["quiet_ratio"]),
    ):
        print(f"  {name:<34} {value:8.2f}  target {target:g}: {'met' if is_met else 'missed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer the router uses")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--duration", type=float, default=15.0, help="seconds of each load")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 1.0, 2.0, 3.0, 5.0])
    parser.add_argument("--quiet-tokens", type=int, default=256, help="the quiet caller's prompts")
    parser.add_argument(
        "--quiet-share", type=float, default=0.15, help="of the capacity that the quiet caller asks for"
    )
    parser.add_argument("--chunk-s", type=float, default=0.04, help="what a PROMPT worker takes for 64 tokens")
    given = parser.parse_args()
    print_header(f"overload: {capacity(given.chunk_s):.0f} prompts of {LOUD_TOKENS} tokens a second can be computed")
    print(f"  good: first token within {SLO_S:g} s; nobody is to wait for longer than {QUEUE_WAIT_S:g} s for a worker")
    with running_processes(fetch_model(given.model), given.chunk_s) as port:
        uvloop.run(run(port, given))


if __name__ == "__main__":
    main()
