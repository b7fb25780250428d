"""A workload is sent to a real cluster and replayed in the simulator: nothing is lost, both sides count the same."""

import json
from pathlib import Path

from cost_profiles import cost_profile
from live_cluster import LiveCluster
from twinpool.cluster.cost_profile import CostProfile, WorkerCapacity
from twinpool.cluster.sizing.calibrate import fingerprint_of
from twinpool.cluster.sizing.live_prober import LiveProber
from twinpool.cluster.sizing.probing import ProbedWorker
from twinpool.cluster.sizing.record import Target, record_runs
from twinpool.cluster.sizing.recording import load_recording
from twinpool.cluster.sizing.summary import distribution
from twinpool.cluster.sizing.validate import validate
from twinpool.cluster.sizing.workload import Request

ENGINE = {"kind": "fake", "num_blocks": 64, "block_size": 16}
REQUESTS = [Request(f"r{i}", 0.03 * i, 20 + 7 * i, 2 + i) for i in range(15)]
NUM_TOKENS = sum(request.num_output_tokens for request in REQUESTS)


def profile_of(worker: ProbedWorker) -> CostProfile:
    """Return a profile of such workers whose times are made up."""
    capacity = WorkerCapacity(
        num_blocks=worker.num_blocks,
        block_size_tokens=worker.block_size,
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
    )
    made = cost_profile(prompt=capacity, completion=capacity, kv_bytes_per_token=worker.kv_bytes_per_token)
    return made.model_copy(update={"fingerprint": fingerprint_of(worker, 1)})


def test_a_recorded_run_and_its_replay_are_of_the_same_thing(tiny_llama: Path, tmp_path: Path) -> None:
    spec = {pool: {"num_workers": 2, "engine": ENGINE} for pool in ("prompt", "completion")}
    seen: list[object] = []
    with (
        LiveCluster(tiny_llama, spec) as cluster,
        LiveProber(cluster.folder / "admin.sock", cluster.url, cluster.model) as prober,
    ):
        recording = record_runs(prober, Target(cluster.url, cluster.model), REQUESTS, 2, seen.append)
        profile = profile_of(prober.workers()[0])
    assert len(seen) == 2 * len(REQUESTS)
    recording.save(tmp_path / "run.jsonl")
    assert load_recording(tmp_path / "run.jsonl") == recording

    found = validate(recording, profile)
    assert found.problems == []
    assert len(found.cells) == 16
    assert all(cell.live_s > 0 for cell in found.cells if cell.statistic == "mean")
    for run in (*found.live, *found.predicted):
        assert all(outcome.is_finished for outcome in run.outcomes)
        assert [outcome.num_tokens for outcome in run.outcomes] == [r.num_output_tokens for r in REQUESTS]
        assert sum(run.gaps.values()) == NUM_TOKENS - len(REQUESTS)
        assert run.num_workers == 4
    for run in found.live:
        assert distribution(outcome.prefill_end_s for outcome in run.outcomes).num == len(REQUESTS)
        for outcome in run.outcomes:
            assert outcome.prefill_start_s is not None
            assert outcome.first_token_s is not None
            assert outcome.request.arrival_s < outcome.prefill_start_s < outcome.first_token_s
    assert len(json.loads(recording.requests[0].model_dump_json())["runs"]) == 2
