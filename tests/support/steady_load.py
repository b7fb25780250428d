"""Clients that ask without pause while things break, and what came of it: right answers, honest errors, wrong ones."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from live_cluster import LiveCluster

HONEST_STATUSES = {502, 503, 504}
Answer = list[int]


@dataclass
class Outcomes:
    """Counts by outcome, and the first few of what must not happen."""

    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    last_finished_s: float = 0.0
    longest_gap_s: float = 0.0


class SteadyLoad:
    """`num_clients` threads that send requests of `prompts` until `stop`; `right(number)` is the only right answer.

    Half of the requests are streams, of which some are left in the middle. An answer that says it is complete has to be
    right. An error has to be said in words, with a status or in the stream.
    """

    def __init__(
        self, cluster: LiveCluster, num_clients: int, prompts: list[dict[str, Any]], right: Callable[[int], Answer]
    ) -> None:
        self._cluster, self._prompts, self._right = cluster, prompts, right
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.outcomes = Outcomes(last_finished_s=time.monotonic())
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(num_clients)]

    def __enter__(self) -> "SteadyLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self._cluster.url, timeout=60.0) as client:
            while not self._stopping.is_set():
                number = rng.randrange(len(self._prompts))
                try:
                    outcome = self._ask(client, number, rng)
                except (httpx.HTTPError, ValueError, KeyError, AssertionError) as error:
                    outcome = f"wrong: {error!r}"
                self._note(outcome, number)

    def _ask(self, client: httpx.Client, number: int, rng: random.Random) -> str:
        body = {**self._prompts[number], "return_token_ids": True, "ignore_eos": True}
        if rng.random() < 0.5:
            response = client.post("/v1/completions", json=body)
            if response.status_code in HONEST_STATUSES:
                time.sleep(0.2)
                return f"failed: {response.json()['error']['code']}"
            assert response.status_code == 200, response.text
            return self._judged(number, response.json()["choices"][0]["token_ids"])
        leaves_after = rng.randrange(body["max_tokens"]) if rng.random() < 0.2 else None
        return self._stream(client, {**body, "stream": True}, number, leaves_after)

    def _stream(self, client: httpx.Client, body: dict[str, Any], number: int, leaves_after: int | None) -> str:
        tokens: Answer = []
        with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code in HONEST_STATUSES:
                time.sleep(0.2)
                return f"failed: {response.status_code}"
            assert response.status_code == 200, response.read()
            for chunk in chunks_of(response):
                if "error" in chunk:
                    return f"failed: {chunk['error']['code']}"
                tokens += chunk["choices"][0]["token_ids"]
                if leaves_after is not None and len(tokens) > leaves_after:
                    return "left"
        return self._judged(number, tokens)

    def _judged(self, number: int, tokens: Answer) -> str:
        right = self._right(number)
        return "right" if tokens == right else f"wrong: request {number}: {tokens[:9]} where {right[:9]} is right"

    def _note(self, outcome: str, number: int) -> None:
        with self._lock:
            self.outcomes.counts[outcome.partition(":")[0]] += 1
            if outcome.startswith("wrong"):
                self.outcomes.wrong = [*self.outcomes.wrong, outcome][:10]
            if outcome == "right":
                now = time.monotonic()
                gap_s = now - self.outcomes.last_finished_s
                self.outcomes.longest_gap_s = max(self.outcomes.longest_gap_s, gap_s)
                self.outcomes.last_finished_s = now


def chunks_of(response: httpx.Response) -> Any:
    """Yield the chunks of a stream up to [DONE]; fails when it ends without."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("a stream ended without [DONE]")
