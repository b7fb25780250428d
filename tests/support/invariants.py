"""What must hold after every fault, as far as it can be seen from outside: the invariants of the fault rows.

`Asker` sends requests whose only right answer is known, and keeps how each ended: once, right or with an error.
`Invariants` looks at the processes before and after: nothing left over, few log lines, no traceback, served again soon.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
from live_cluster import LiveCluster, wait_until
from reports import report
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260  # of the tiny models' tokenizer
MAX_LOG_LINES_PER_FAULT = 50
CANARY_S = 2.0  # from the healing of the last fault to an answer, beyond what an answer takes
CANARY = 9999  # its number
OPEN_SLACK = 4  # descriptors and threads that a new connection to an old peer may need


@dataclass(frozen=True)
class Answer:
    """How one request ended for its client."""

    number: int
    tokens: list[int]
    ends: list[str]  # finish reasons and error codes, as they came
    seconds: float
    num_attempts: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.ends == ["length"]


@dataclass
class Asker:
    """Asks a cluster of fake engines, from threads of its own."""

    cluster: LiveCluster
    num_prompt_tokens: int = 40
    num_tokens: int = 32
    threads: int = 8
    answers: list[Answer] = field(default_factory=list[Answer])

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads)

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, numbers: Iterable[int]) -> list[Future[Answer]]:
        return [self._pool.submit(self.ask, number) for number in numbers]

    def ask_all(self, numbers: Iterable[int], within_s: float = 100.0) -> list[Answer]:
        return [future.result(timeout=within_s) for future in self.begin(numbers)]

    def run(self, work: Callable[..., Any], *given: Any, **fields: Any) -> Future[Any]:
        """Do something else in one of the threads."""
        return self._pool.submit(work, *given, **fields)

    def ask(self, number: int) -> Answer:
        """Send request `number`, streamed; fails for a wrong token and for any end but a single proper one."""
        began_s = time.monotonic()
        prompt = prompt_of(number, self.num_prompt_tokens)
        answer = read_answer(self.cluster, number, prompt, self.num_tokens, began_s)
        right = right_tokens(number, self.num_prompt_tokens, self.num_tokens)
        assert answer.tokens == right[: len(answer.tokens)], f"request {number}: wrong tokens"
        assert len(answer.ends) == 1, f"request {number} ended by {answer.ends}"
        assert not answer.is_complete or answer.tokens == right, f"request {number}: complete, and tokens are missing"
        self.answers.append(answer)
        return answer


def prompt_of(number: int, length: int) -> list[int]:
    return [(number * 7 + i * (1 + number % 5)) % 250 + 4 for i in range(length)]


@lru_cache(maxsize=4096)
def right_tokens(number: int, length: int, num_tokens: int) -> list[int]:
    return expected_tokens(prompt_of(number, length), num_tokens, VOCAB_SIZE, seed=number)


def read_answer(cluster: LiveCluster, number: int, prompt: list[int], num_tokens: int, began_s: float) -> Answer:
    """Send a streamed request and read it to its end; a connection that breaks off is an end of its own."""
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number, "return_token_ids": True, "timing": True}
    body = {"model": cluster.model, "prompt": prompt, "stream": True, **fields}
    tokens: list[int] = []
    ends: list[str] = []
    attempts: list[int] = []
    try:
        with (
            httpx.Client(base_url=cluster.url, timeout=60.0) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                code = str(response.json()["error"]["code"])
                return Answer(number, [], [f"{response.status_code} {code}"], time.monotonic() - began_s)
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]", lines[-1]
            for line in lines[:-1]:
                _note(json.loads(line), tokens, ends, attempts)
    except httpx.TransportError:
        ends.append("connection lost")
    return Answer(number, tokens, ends, time.monotonic() - began_s, attempts[-1] if attempts else None)


def _note(event: dict[str, Any], tokens: list[int], ends: list[str], attempts: list[int]) -> None:
    if "error" in event:
        ends.append(str(event["error"]["code"]))
        return
    if event.get("timing"):
        attempts.append(event["timing"]["num_attempts"])
    for choice in event["choices"]:
        assert not ends, f"an event after the end: {event}"
        tokens += choice["token_ids"]
        if choice["finish_reason"] is not None:
            ends.append(choice["finish_reason"])


@dataclass(frozen=True)
class Opened:
    """What a process has open."""

    pid: int
    num_threads: int
    num_descriptors: int
    num_children: int


def open_things(cluster: LiveCluster) -> dict[str, Opened]:
    found: dict[str, Opened] = {}
    for name, process in cluster.processes.items():
        proc = Path("/proc") / str(process.pid)
        children = (proc / "task" / str(process.pid) / "children").read_text().split()
        threads, descriptors = os.listdir(proc / "task"), os.listdir(proc / "fd")
        found[name] = Opened(process.pid, len(threads), len(descriptors), len(children))
    return found


class Invariants:
    """Made when all is well, before the first fault; `check` when the last one has healed."""

    def __init__(self, cluster: LiveCluster, asker: Asker) -> None:
        self._cluster = cluster
        self._asker = asker
        assert all(answer.is_complete for answer in asker.ask_all(range(16)))  # every pair has met
        cluster.wait_idle()
        self._calm_s = asker.ask(CANARY).seconds
        self._before = open_things(cluster)
        self._num_log_lines = self._count_log_lines()

    def check(self, num_faults: int) -> None:
        """Call it right after healing: asks a canary first, then waits until all is at rest and looks."""
        healed_s = time.monotonic()
        limit_s = CANARY_S + 3 * self._calm_s  # what it costs anyway, on a machine with more to do than before
        wait_until(lambda: self._asker.ask(CANARY).is_complete, limit_s, "a canary that is served")
        waited_s = time.monotonic() - healed_s
        report(f"canary served after {waited_s:.1f} s; {self._calm_s:.1f} s before the faults")
        assert waited_s <= limit_s, f"the canary took {waited_s:.1f} s"
        self._cluster.wait_ready()
        self._cluster.wait_idle()
        self._check_logs(num_faults)
        wait_until(lambda: not self._left_over(), 10, f"what was opened closed again: {self._left_over()}")

    def _check_logs(self, num_faults: int) -> None:
        num_lines = self._count_log_lines() - self._num_log_lines
        allowed = MAX_LOG_LINES_PER_FAULT * num_faults
        assert num_lines <= allowed, f"{num_lines} log lines for {num_faults} faults\n{self._cluster.logs()}"
        for path in self._cluster.folder.glob("*.log"):
            assert "Traceback" not in path.read_text(), f"{path.name}:\n{path.read_text()[-5000:]}"

    def _left_over(self) -> list[str]:
        """Return which processes, of those that are still the same, have more open than before."""
        left: list[str] = []
        for name, now in open_things(self._cluster).items():
            before = self._before[name]
            is_more = (
                now.num_threads > before.num_threads + OPEN_SLACK
                or now.num_descriptors > before.num_descriptors + OPEN_SLACK
                or now.num_children > before.num_children
            )
            if now.pid == before.pid and is_more:
                left.append(f"{name}: {before} → {now}")
        return left

    def _count_log_lines(self) -> int:
        return sum(path.read_text().count("\n") for path in self._cluster.folder.glob("*.log"))
