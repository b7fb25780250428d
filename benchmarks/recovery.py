"""How soon a dead or hung worker is noticed, and how soon its clients' streams go on, under a steady load of streams.

Two PROMPT and two COMPLETION workers; a number of clients stream without a pause, and every answer's tokens are
compared with the only right ones. One worker after the other is killed (SIGKILL), stopped (SIGSTOP) or has its engine
loop hang while its other threads go on, and is started anew. Detection: from the fault until the router declares the
worker gone. Recovery: from the fault until each stream that needed another attempt goes on. The targets: detection
within 3 s, recovery within 5 s at p95.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measure import print_header, spread
from twinpool.engine.fake import expected_tokens
from twinpool.engine.fetch import fetch_model

from router import quantile

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from live_cluster import LiveCluster, wait_until

FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "hung": signal.SIGUSR1}
# Python runs it in the main thread, which is a worker's engine loop: the heartbeat's thread and the sockets' go on.
HANG = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))\n"
TARGETS_S = {"detection": 3.0, "recovery": 5.0}
VOCAB_SIZE = 49152  # of the chat model, whose tokenizer the router uses
SETTLE_S = 2.0


@dataclass
class Answer:
    """One streamed request as its client saw it."""

    began_s: float
    token_times_s: list[float] = field(default_factory=list[float])
    token_ids: list[int] = field(default_factory=list[int])
    ended_s: float = 0.0
    num_attempts: int = 0
    problem: str = ""  # of a request that ended without an answer
    is_wrong: bool = False

    def went_on_s(self, fault_s: float) -> float:
        """Return when the longest silence around the fault ended."""
        times = [self.began_s, *self.token_times_s]
        gaps = [(after - before, after) for before, after in pairwise(times) if after > fault_s]
        return max(gaps)[1]


@dataclass(frozen=True)
class Fault:
    kind: str
    victim: str
    at_s: float
    gone_s: float

    @property
    def pool(self) -> str:
        return self.victim.partition("-")[0].upper()


class Load:
    """Clients that stream one request after the other, each from its own seed, until they are told to stop."""

    def __init__(self, cluster: LiveCluster, given: argparse.Namespace) -> None:
        self.answers: list[Answer] = []
        self._cluster = cluster
        self._given = given
        self._oracle: dict[int, list[int]] = {}  # of the real model: what each prompt was answered before any fault
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(given.streams)]

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._given.real:
            for number in range(self._given.streams):
                self._oracle[number] = self._ask(number).token_ids
        for thread in self._threads:
            thread.start()
        try:
            self.wait_steady()
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()

    def wait_steady(self) -> None:
        """Wait until every client has had a whole answer that was asked for after now."""
        began_s = time.monotonic()
        wait_until(lambda: self._num_ended(began_s) >= self._given.streams, 120, "a steady load")

    def _num_ended(self, since_s: float) -> int:
        return sum(answer.began_s >= since_s for answer in self.answers)

    def _client(self, number: int) -> None:
        draws = random.Random(number)
        while not self._is_over.is_set():
            seed = number if self._given.real else draws.randrange(1 << 30)
            self.answers.append(self._ask(seed))

    def _ask(self, seed: int) -> Answer:
        prompt = random.Random(seed).choices(range(1000, 40000), k=self._given.prompt_tokens)
        answer = Answer(time.monotonic())
        fields = {"max_tokens": self._given.output_tokens, "ignore_eos": True, "temperature": 0, "seed": seed}
        try:
            for chunk in self._cluster.stream(prompt, **fields, return_token_ids=True, timing=True):
                self._take(answer, chunk)
        except Exception as error:
            answer.problem = f"{type(error).__name__}: {error}"
        answer.ended_s = time.monotonic()
        if not answer.problem and len(answer.token_ids) != self._given.output_tokens:
            answer.problem = f"{len(answer.token_ids)} tokens of {self._given.output_tokens}"
        if not answer.problem:
            answer.is_wrong = answer.token_ids != self._right(prompt, seed, answer)
        return answer

    @staticmethod
    def _take(answer: Answer, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            answer.problem = chunk["error"]["message"]
        for choice in chunk.get("choices", ()):
            if choice.get("token_ids"):
                answer.token_times_s.append(time.monotonic())
                answer.token_ids += choice["token_ids"]
        if chunk.get("timing"):
            answer.num_attempts = chunk["timing"]["num_attempts"]

    def _right(self, prompt: list[int], seed: int, answer: Answer) -> list[int]:
        if self._given.real:
            return self._oracle.get(seed, answer.token_ids)
        return expected_tokens(prompt, len(answer.token_ids), VOCAB_SIZE, seed=seed)


def strike(cluster: LiveCluster, kind: str, victim: str) -> Fault:
    """Do it, wait until the router declares the worker gone, and start it anew."""
    at_s = time.monotonic()
    cluster.processes[victim].send_signal(FAULTS[kind])
    gone_s = wait_until(lambda: _gone_s(cluster, victim, at_s), 60, f"{victim}, {kind}, declared gone")
    cluster.kill(victim)
    cluster.start(victim)
    wait_until(lambda: (cluster.worker(victim) or {}).get("load"), 60, f"{victim} back")
    return Fault(kind, victim, at_s, gone_s)


def _gone_s(cluster: LiveCluster, victim: str, since_s: float) -> float | None:
    now, incidents = time.monotonic(), cluster.status()["incidents"]
    times = [now - i["at_s_ago"] for i in incidents if i["worker"] == victim and i["what"].startswith("gone: ")]
    return next((at_s for at_s in times if at_s > since_s), None)


def leaked_blocks(cluster: LiveCluster) -> int:
    """Return how many blocks are neither free nor cached once nothing has run for long enough."""
    try:
        cluster.wait_idle(30.0)
    except AssertionError:
        loads = [worker["load"] for worker in cluster.status()["workers"]]
        return sum(load["num_blocks"] - load["num_free_blocks"] - load["num_cached_blocks"] for load in loads)
    return 0


def spec(given: argparse.Namespace) -> dict[str, Any]:
    if given.real:
        engine: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 1 << 28}
        prompt = completion = engine
    else:
        engine = {"kind": "fake", "num_blocks": 1024, "block_size": 16}
        prompt = engine | {"fake_seconds_per_row": given.prefill_s}
        completion = engine | {"fake_seconds_per_row": given.token_s}
    pools = {"prompt": {"num_workers": 2, "engine": prompt}, "completion": {"num_workers": 2, "engine": completion}}
    return {"served_model_name": "benchmark", "router": {"max_queue_wait_s": 600}, **pools}


def run(cluster: LiveCluster, given: argparse.Namespace) -> tuple[list[Fault], list[Answer]]:
    faults: list[Fault] = []
    load = Load(cluster, given)
    with load.running():
        for number in range(given.faults):
            for pool in given.pools:
                for kind in given.kinds:
                    time.sleep(random.Random(number).uniform(0.0, SETTLE_S))  # so that faults hit every moment
                    faults.append(strike(cluster, kind, f"{pool}-{number % 2}"))
                    load.wait_steady()
                    detected_s = faults[-1].gone_s - faults[-1].at_s
                    print(f"  {faults[-1].victim} {kind}: gone after {detected_s:.2f} s", file=sys.stderr, flush=True)
    return faults, load.answers


def show(faults: Sequence[Fault], answers: Sequence[Answer]) -> None:
    everything: list[float] = []
    print(f"  {'':<21}{'detection: median (least to most)':<40}recovery: p50, p95, max of the streams hit")
    for pool, kind in dict.fromkeys((fault.pool, fault.kind) for fault in faults):
        own = [fault for fault in faults if (fault.pool, fault.kind) == (pool, kind)]
        recovered_s = [s for fault in own for s in recoveries(fault, answers)]
        everything += recovered_s
        detected = spread([fault.gone_s - fault.at_s for fault in own], digits=2)
        print(f"  {pool + ' ' + kind:<21}{detected:<40}{_quantiles(recovered_s)}")
    detection_s = max(fault.gone_s - fault.at_s for fault in faults)
    print(f"  slowest detection {detection_s:.2f} s, {_verdict(detection_s, 'detection')}")
    if everything:
        print(f"  all recoveries: {_quantiles(everything)}: {_verdict(quantile(everything, 0.95), 'recovery')}")
    gaps = [b - a for x in answers for a, b in pairwise(x.token_times_s)]
    print(f"  for comparison, the median gap between two tokens of a stream: {statistics.median(gaps):.3f} s")


def show_losses(answers: Sequence[Answer], num_leaked: int) -> None:
    failed = [answer for answer in answers if answer.problem]
    print(f"  {len(answers)} requests, {sum(answer.num_attempts > 1 for answer in answers)} of them hit")
    print(f"  wrong answers: {sum(answer.is_wrong for answer in answers)}")
    print(f"  failed requests: {len(failed)}" + "".join(f"\n    {answer.problem}" for answer in failed[:5]))
    print(f"  leaked blocks: {num_leaked}", flush=True)


def recoveries(fault: Fault, answers: Sequence[Answer]) -> list[float]:
    """Return the seconds from the fault until each stream that it hit went on."""
    hit = [x for x in answers if x.began_s < fault.gone_s and x.ended_s > fault.at_s and x.num_attempts > 1]
    return [x.went_on_s(fault.at_s) - fault.at_s for x in hit]


def _quantiles(values: list[float]) -> str:
    if not values:
        return "no stream was hit"
    return f"{quantile(values, 0.5):.2f}, {quantile(values, 0.95):.2f}, {max(values):.2f} s (n={len(values)})"


def _verdict(value_s: float, what: str) -> str:
    return f"at most {TARGETS_S[what]:g} s: {'met' if value_s <= TARGETS_S[what] else 'missed'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="the 135M chat model in place of fake engines")
    parser.add_argument("--faults", type=int, default=3, help="of each kind in each pool")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--pools", nargs="+", choices=["prompt", "completion"], default=["prompt", "completion"])
    parser.add_argument("--streams", type=int, default=8, help="clients that stream at any time")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--prefill-s", type=float, default=0.1, help="what a fake engine takes for a prompt")
    parser.add_argument("--token-s", type=float, default=0.005, help="and for a token of each stream of a step")
    given = parser.parse_args()
    print_header("recovery: workers that die or hang under a steady load of streams")
    folder = fetch_model("smollm2")
    with TemporaryDirectory() as path:
        (Path(path) / "hang.py").write_text(HANG)
        os.environ["PYTHONPATH"] = path
        os.environ["TWINPOOL_ALSO"] = "hang"
        with LiveCluster(folder, spec(given)) as cluster:
            faults, answers = run(cluster, given)
            show(faults, answers)
            show_losses(answers, leaked_blocks(cluster))


if __name__ == "__main__":
    main()
