"""An open-loop load generator: sends each request at its arrival time, whatever became of those before it.

One process, one thread; it shares its host with the cluster that it measures, so it does little and reports how much
of a core it took. What it saw is a LiveRun (see recording.py). Used by `twinpool validate` and by benchmarks.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

import httpx

from ..client_key import KEY_HINT, key_headers
from ..protocol.errors import ConfigError, LaunchError
from .probing import ProbedWorker, Prober
from .recording import LiveRun, Recording, Sighting, join_runs
from .workload import Request

MAX_LATE_S = 0.1  # sends that fall further behind measure the generator, not the cluster
TIMEOUT_S = 600.0
NUM_WARMUP = 4
KEEPALIVE_S = 3.0  # shorter than any server's: nobody closes a connection that we are about to use
TOKEN_IDS = range(32, 256)  # in every vocabulary, no special tokens
EVENT = b"data: "


@dataclass(frozen=True)
class Target:
    """Where to send, and what tells apart the prompts of one run from those of every other."""

    endpoint: str
    model: str
    seed: int | str = 0


def record_run(
    target: Target,
    requests: Sequence[Request],
    on_done: Callable[[Sighting], None] | None = None,
    max_late_s: float = MAX_LATE_S,
) -> LiveRun:
    """Send the requests once and return what was seen; failed ones included.

    Raises ConfigError when they are not in order of arrival, and LaunchError when nobody answers at the endpoint or
    when the generator itself could not keep up.
    """
    if any(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(requests)):
        raise ConfigError("requests must be sorted by arrival_s")
    run = asyncio.run(_Generator(target, on_done).run(requests))
    if run.max_late_s > max_late_s:
        raise LaunchError(
            f"the load generator fell {run.max_late_s * 1000:.0f} ms behind its arrivals, more than "
            f"{max_late_s * 1000:.0f} ms, at {run.client_cpu_share:.0%} of a core: it measured itself",
            hint="give it a core of its own, lower the rate, or quieten the machine",
        )
    return run


def record_runs(
    prober: Prober,
    target: Target,
    requests: Sequence[Request],
    num_runs: int,
    on_done: Callable[[Sighting], None] | None = None,
) -> Recording:
    """Send the same arrivals `num_runs` times, each time with other prompts, after a few that warm everything up.

    Raises LaunchError as `record_run` does, and when the workers are not the same ones at the end; ConfigError when a
    request does not fit into the workers' context.
    """
    workers = sorted(prober.workers(), key=lambda worker: worker.name)
    _check_lengths(requests, workers)
    warmup = [replace(request, arrival_s=0.0) for request in requests[:NUM_WARMUP]]
    record_run(replace(target, seed=f"{target.seed}:warm-up"), warmup, max_late_s=inf)
    runs = [record_run(replace(target, seed=f"{target.seed}:{i}"), requests, on_done) for i in range(num_runs)]
    after = sorted(prober.workers(), key=lambda worker: worker.name)
    if after != workers:
        before, now = (", ".join(worker.name for worker in side) for side in (workers, after))
        raise LaunchError(f"the pools changed during the run, from {before} to {now}", hint="`twinpool status`")
    return join_runs(workers, requests, runs)


def _check_lengths(requests: Sequence[Request], workers: Sequence[ProbedWorker]) -> None:
    longest = max(requests, key=lambda request: request.num_prompt_tokens + request.num_output_tokens)
    most = min(worker.max_model_len for worker in workers)
    if longest.num_prompt_tokens + longest.num_output_tokens > most:
        raise ConfigError(
            f"{longest.request_id} has {longest.num_prompt_tokens} prompt and {longest.num_output_tokens} output "
            f"tokens, the context of the workers holds {most}"
        )


def request_body(target: Target, request: Request) -> bytes:
    """Return the JSON of one streamed completion of exactly these lengths, with a prompt that shares no prefix."""
    rng = random.Random(f"{target.seed}:{request.request_id}")
    num_tokens = request.num_output_tokens
    body = {
        "model": target.model,
        "prompt": rng.choices(TOKEN_IDS, k=request.num_prompt_tokens),
        "max_tokens": num_tokens,
        "min_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "timing": True,
        "return_token_ids": True,
    }
    return json.dumps(body, separators=(",", ":")).encode()


class _Generator:
    def __init__(self, target: Target, on_done: Callable[[Sighting], None] | None) -> None:
        self._target = target
        self._on_done = on_done
        self._origin_s = 0.0

    async def run(self, requests: Sequence[Request]) -> LiveRun:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
        async with httpx.AsyncClient(
            base_url=self._target.endpoint, headers=key_headers(), timeout=TIMEOUT_S, limits=limits, trust_env=False
        ) as http:
            await self._check_endpoint(http)
            cpu_s, self._origin_s = time.process_time(), time.perf_counter()
            async with asyncio.TaskGroup() as group:
                tasks = [task async for task in self._start(group, http, requests)]
            share = (time.process_time() - cpu_s) / max(self._now_s(), 1e-9)
        sightings = [task.result() for task in tasks]
        late = (seen.sent_s - request.arrival_s for seen, request in zip(sightings, requests, strict=True))
        return LiveRun(sightings, share, max(late, default=0.0))

    async def _start(
        self, group: asyncio.TaskGroup, http: httpx.AsyncClient, requests: Sequence[Request]
    ) -> AsyncIterator[asyncio.Task[Sighting]]:
        """Start each request at its time; its body is made before."""
        for request in requests:
            body = request_body(self._target, request)
            await asyncio.sleep(request.arrival_s - self._now_s())
            yield group.create_task(self._send(http, body))

    def _now_s(self) -> float:
        return time.perf_counter() - self._origin_s

    async def _check_endpoint(self, http: httpx.AsyncClient) -> None:
        try:
            ready = await http.get("/health/ready")
        except httpx.HTTPError as error:
            raise LaunchError(f"nobody answers at {self._target.endpoint}: {error}") from error
        if ready.status_code != 200:
            hint = KEY_HINT if ready.status_code == 401 else "twinpool status"
            raise LaunchError(f"{self._target.endpoint} is not ready ({ready.status_code})", hint=hint)

    async def _send(self, http: httpx.AsyncClient, body: bytes) -> Sighting:
        sent_s = self._now_s()
        answer = _Answer()
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                http.stream(
                    "POST", "/v1/completions", content=body, headers={"content-type": "application/json"}
                ) as response,
            ):
                if response.status_code == 200:
                    await self._read(response.aiter_raw(), answer)
                else:
                    answer.error = f"status {response.status_code}: {(await response.aread())[:300].decode()}"
        except (httpx.HTTPError, TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        seen = Sighting(
            sent_s=sent_s, token_times_s=tuple(answer.token_times_s), timing=answer.timing, error=answer.error
        )
        if self._on_done:
            self._on_done(seen)
        return seen

    async def _read(self, pieces: AsyncIterator[bytes], answer: "_Answer") -> None:
        rest = b""
        async for piece in pieces:
            now_s = self._now_s()
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                answer.take(event, now_s)
        if not answer.is_complete and answer.error is None:
            answer.error = "the stream ended before [DONE]"


class _Answer:
    """One stream as it comes in."""

    def __init__(self) -> None:
        self.token_times_s: list[float] = []
        self.timing: dict[str, float | None] = {}
        self.error: str | None = None
        self.is_complete = False

    def take(self, event: bytes, now_s: float) -> None:
        if not event.startswith(EVENT):
            return  # a comment that keeps the connection alive
        if event == b"data: [DONE]":
            self.is_complete = True
            return
        chunk: dict[str, Any] = json.loads(event[len(EVENT) :])
        if "error" in chunk:
            self.error = str(chunk["error"])
            return
        for choice in chunk["choices"]:
            self.token_times_s.extend([now_s] * len(choice["token_ids"]))
        self.timing = chunk.get("timing") or self.timing
