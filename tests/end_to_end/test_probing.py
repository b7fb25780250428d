"""The calibrator's questions to live workers: real passes, real transfers, clear refusals, and requests beside them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_cluster import LiveCluster
from twinpool.cluster.config import EngineSpec
from twinpool.cluster.protocol.errors import LaunchError
from twinpool.cluster.sizing.live_prober import LiveProber
from twinpool.engine.fake import FAKE_LAYOUT

ENGINE = {"kind": "fake", "num_blocks": 64, "max_num_batched_tokens": 128, "max_num_seqs": 8, "max_model_len": 512}
POOL = {"num_workers": 1, "engine": ENGINE}
SECONDS_PER_ROW = EngineSpec().fake_seconds_per_row


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path) -> Iterator[LiveCluster]:
    """Its end asserts that every block is free again and every process ends by itself."""
    with LiveCluster(tiny_llama, {"prompt": POOL, "completion": POOL}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prober(cluster: LiveCluster) -> Iterator[LiveProber]:
    with LiveProber(cluster.folder / "admin.sock", cluster.url, cluster.model) as prober:
        yield prober


def test_workers_say_what_they_are(prober: LiveProber) -> None:
    completion, prompt = sorted(prober.workers(), key=lambda worker: worker.name)
    assert (prompt.role, completion.role, prompt.engine) == ("PROMPT", "COMPLETION", "fake")
    assert (prompt.num_blocks, prompt.max_model_len, prompt.max_num_batched_tokens, prompt.max_num_seqs) == (
        *(64, 512),
        *(128, 8),
    )
    assert prompt.kv_bytes_per_token == FAKE_LAYOUT.token_bytes


@pytest.mark.parametrize("worker", ["prompt-0", "completion-0"])
def test_a_pass_takes_at_least_what_its_engine_takes(prober: LiveProber, worker: str) -> None:
    """Prompts, decode rows and both together, on either kind of worker; the fake engine sleeps for every row."""
    for rows in ([(0, 128)], [(256, 1)] * 2, [(16, 100), (32, 1), (0, 1)]):
        times_s = prober.time_passes(worker, rows, num_warmup=1, num_repeats=3)
        assert len(times_s) == 3
        assert min(times_s) >= len(rows) * SECONDS_PER_ROW


def test_a_transfer_is_timed_and_leaves_the_workers_idle(prober: LiveProber) -> None:
    assert len(prober.time_transfers("prompt-0", "completion-0", 400, num_repeats=3)) == 3
    assert prober.time_transfers("prompt-0", "completion-0", 1, num_repeats=1)[0] > 0
    prober.time_passes("completion-0", [(500, 1)], 0, 1)


def test_a_request_is_timed_by_its_client(prober: LiveProber) -> None:
    times = prober.time_request(100)
    assert times.ttft_s >= times.prefill_s + times.prefill_queue_s >= SECONDS_PER_ROW


@pytest.mark.parametrize(
    ("worker", "rows", "numbers"),
    [
        ("prompt-0", [(0, 129)], ("129", "128")),
        ("prompt-0", [(9, 1)] * 9, ("9 rows", "8")),
        ("prompt-0", [(512, 1)], ("513", "512")),
        ("completion-0", [(400, 1)] * 3, ("78 KV blocks", "64")),
        ("prompt-9", [(0, 1)], ("prompt-9", "completion-0, prompt-0")),
        ("prompt-0", [(0, 0)], ("rows", "1")),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(
    prober: LiveProber, worker: str, rows: list[tuple[int, int]], numbers: tuple[str, str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        prober.time_passes(worker, rows, 1, 1)
    assert all(number in str(caught.value) for number in numbers), caught.value


def test_probes_run_beside_each_other_and_requests_wait_for_their_end(cluster: LiveCluster, prober: LiveProber) -> None:
    """Nothing new goes to a worker under probe; the answer is right all the same."""
    with ThreadPoolExecutor(3) as pool:
        probes = [pool.submit(prober.time_passes, name, [(0, 64)], 1, 40) for name in ("prompt-0", "completion-0")]
        body = pool.submit(cluster.complete, [5, 6, 7], max_tokens=3).result(timeout=30)
        assert all(len(probe.result(timeout=30)) == 40 for probe in probes)
    assert body["usage"]["completion_tokens"] == 3


def test_streams_give_gaps_beside_requests_and_are_cancelled(prober: LiveProber) -> None:
    """Their worker is idle again soon after, which the next probe needs."""
    with prober.streams(2) as streams:
        assert len(streams.gaps_s(20)) >= 20
        prober.time_request(50)
        assert min(streams.gaps_s(1)) > 0
    prober.time_passes("completion-0", [(16, 1)], 0, 1)
