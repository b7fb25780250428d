"""Twenty minutes of load with a fault every twenty seconds: nothing wrong, nothing lost, nothing that grows.

TWINPOOL_SOAK_S sets how long both parts take together: three quarters with the fake engine, one with the chat model.
"""

import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster, open_things, wait_until
from prompts import texts
from steady_load import Answer, Outcomes, SteadyLoad
from tokenizers import Tokenizer
from twinpool.engine.fake import expected_tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SOAK_S = float(os.environ.get("TWINPOOL_SOAK_S", "1200"))
FAULT_EVERY_S = 20.0
NUM_COMPARED = 100  # answers at the beginning and at the end
NUM_CLIENTS = 8
VOCAB_SIZE = 260
REQUESTS_PER_S = 50_000 / (90 * 60)  # what the scorecard asks of an hour and a half
LIVE_ALONG = ("router", "prompt-0", "completion-0")  # are stopped for a while and never killed, so that growth shows
MAX_GAP_S = 10.0  # between two right answers of any of the clients
MB = 1 << 20

Fault = Callable[[LiveCluster], None]
Prompts = list[dict[str, Any]]


def kill_and_start(name: str, number: int) -> Fault:
    def happen(cluster: LiveCluster) -> None:
        cluster.kill(name, number)
        cluster.processes[name].wait(20)
        cluster.start(name)
        wait_until(lambda: cluster.worker(name), 200, f"{name} back")

    return happen


def stop_for(name: str, pause_s: float) -> Fault:
    def happen(cluster: LiveCluster) -> None:
        cluster.kill(name, signal.SIGSTOP)
        time.sleep(pause_s)
        cluster.kill(name, signal.SIGCONT)

    return happen


FAULTS: list[Fault] = [
    kill_and_start("prompt-1", signal.SIGKILL),
    stop_for("completion-0", 1.0),
    kill_and_start("completion-1", signal.SIGKILL),
    stop_for("router", 1.0),
    stop_for("prompt-1", 5.0),
    kill_and_start("completion-1", signal.SIGTERM),
    stop_for("prompt-0", 1.0),
    stop_for("completion-1", 5.0),
    kill_and_start("prompt-1", signal.SIGTERM),
    stop_for("router", 4.0),
]


@dataclass
class Growth:
    """Memory of the processes that live all along, over time."""

    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict[str, list[tuple[float, float]]])

    def look(self, cluster: LiveCluster) -> None:
        for name in LIVE_ALONG:
            status = Path(f"/proc/{cluster.processes[name].pid}/status").read_text()
            resident = re.search(r"VmRSS:\s+(\d+) kB", status)
            assert resident is not None, f"{name} is gone"
            self.samples.setdefault(name, []).append((time.monotonic() / 60, int(resident[1]) / 1024))

    def mb_per_minute(self, name: str) -> float:
        """Return the slope of the line through the samples, without the first fifth, in which caches fill."""
        kept = self.samples[name][len(self.samples[name]) // 5 :]
        return statistics.linear_regression(*zip(*kept, strict=True)).slope


def ask_all(cluster: LiveCluster, prompts: Prompts) -> list[Answer]:
    """Return NUM_COMPARED answers, four at a time."""

    def ask(fields: dict[str, Any]) -> Answer:
        body = cluster.complete(**fields, return_token_ids=True, ignore_eos=True)
        return body["choices"][0]["token_ids"]

    # More at once than the load will be: the KV blocks that it uses have been touched by then, and are no growth.
    with ThreadPoolExecutor(2 * NUM_CLIENTS) as threads:
        return list(threads.map(ask, islice(cycle(prompts), NUM_COMPARED)))


def num_ended(cluster: LiveCluster) -> int:
    """Return how many requests have ended, in any way, by the router's own count."""
    page = cluster.client.get("/metrics").text
    ends = re.findall(r"^twinpool_requests_total{.*} (\S+)$", page, re.MULTILINE)
    return sum(int(float(value)) for value in ends)


def soak(cluster: LiveCluster, prompts: Prompts, duration_s: float) -> tuple[Outcomes, int]:
    """Load the cluster for so long while faults happen; check all that must hold; return outcomes and faults."""
    first = ask_all(cluster, prompts)
    growth, num_faults = Growth(), 0
    cluster.wait_idle()
    ended_before, open_before = num_ended(cluster), open_things(cluster)
    end_s = time.monotonic() + duration_s
    faults = cycle(FAULTS)
    with SteadyLoad(cluster, NUM_CLIENTS, prompts, lambda number: first[number]) as load:
        while time.monotonic() + FAULT_EVERY_S <= end_s:
            due_s = time.monotonic() + FAULT_EVERY_S
            next(faults)(cluster)
            num_faults += 1
            while time.monotonic() < due_s:
                growth.look(cluster)
                time.sleep(1.0)
            cluster.wait_ready()
    cluster.wait_idle(60)
    outcomes = load.outcomes
    tell(outcomes, growth, num_faults, duration_s)
    assert outcomes.wrong == []
    assert num_ended(cluster) - ended_before == outcomes.counts.total(), "each request has one end in the metrics"
    assert outcomes.counts["failed"] <= num_faults, "a fault may cost a request; it has another worker to go to"
    assert outcomes.longest_gap_s < MAX_GAP_S
    check_growth(growth, duration_s)
    check_what_is_left(cluster, open_before, num_faults)
    assert ask_all(cluster, prompts) == first
    return outcomes, num_faults


def tell(outcomes: Outcomes, growth: Growth, num_faults: int, duration_s: float) -> None:
    slopes = {name: round(growth.mb_per_minute(name), 2) for name in LIVE_ALONG}
    sys.stderr.write(
        f"\n{duration_s:g} s, {num_faults} faults: {dict(outcomes.counts)}, "
        f"longest wait for a right answer {outcomes.longest_gap_s:.1f} s, MB/min {slopes}\n"
    )


def check_growth(growth: Growth, duration_s: float) -> None:
    """Less than 1 MB a minute; a run of a few minutes sees allocators settle and is given more."""
    limit = 1.0 if duration_s >= 300 else 10.0
    for name in LIVE_ALONG:
        assert growth.mb_per_minute(name) < limit, f"{name} grows"


def check_what_is_left(cluster: LiveCluster, before: dict[str, tuple[int, int, int]], num_faults: int) -> None:
    """No thread, descriptor or child beyond a connection to each peer; few words for a fault, and no traceback."""
    num_peers = len(cluster.names) - 1
    for name in LIVE_ALONG:
        threads, descriptors, children = open_things(cluster)[name]
        assert threads <= before[name][0] + num_peers, name
        assert descriptors <= before[name][1] + 4 * num_peers, name
        assert children == 0, name
    logs = "".join(path.read_text() for path in cluster.folder.glob("*.log"))
    assert "Traceback" not in logs
    assert len(re.findall(r" (?:WARNING|ERROR) ", logs)) <= 50 * num_faults


@pytest.fixture
def fake(tiny_llama: Path) -> Iterator[LiveCluster]:
    pool = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 256, "fake_seconds_per_row": 0.002}}
    with LiveCluster(tiny_llama, {"prompt": pool, "completion": pool}) as cluster:
        yield cluster


@pytest.fixture
def real(smollm2: Path) -> Iterator[LiveCluster]:
    engine = {"dtype": "float32", "kv_cache_bytes": 1 << 28, "max_num_batched_tokens": 256}
    pool = {"num_workers": 2, "engine": engine}
    with LiveCluster(smollm2, {"prompt": pool, "completion": pool, "router": {"max_queue_wait_s": 600}}) as cluster:
        yield cluster


def test_a_soak_with_faults(fake: LiveCluster) -> None:
    """With the fake engine, whose right answers are known; at least the requests that the scorecard asks for."""
    prompts: Prompts = [
        {"prompt": [(7 * i + j) % 250 + 4 for j in range(32 + 2 * i)], "max_tokens": 8 + i % 32, "seed": i}
        for i in range(NUM_COMPARED)
    ]
    outcomes, _ = soak(fake, prompts, 0.75 * SOAK_S)
    assert outcomes.counts["right"] >= REQUESTS_PER_S * 0.75 * SOAK_S
    right = [expected_tokens(one["prompt"], one["max_tokens"], VOCAB_SIZE, seed=one["seed"]) for one in prompts]
    assert ask_all(fake, prompts) == right


@pytest.mark.skipif(SOAK_S < 600, reason="the chat model needs minutes between its faults: TWINPOOL_SOAK_S from 600 on")
def test_a_soak_of_the_chat_model_with_faults(real: LiveCluster, smollm2: Path) -> None:
    """The answers of an undisturbed cluster, to the last token, before, meanwhile and afterwards."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts()]
    prompts: Prompts = [
        {"prompt": ids[:length], "max_tokens": 32, "temperature": 0} for ids in encoded for length in (32, 64, 100, 200)
    ]
    outcomes, _ = soak(real, prompts, 0.25 * SOAK_S)
    assert outcomes.counts["right"] > 0
