"""Calibrating workers of known cost gives their costs back, twice the same, and refuses a machine that moved."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_prober import COMPLETION, PROMPT, TWO_CORES, SimulatedProber
from twinpool.cluster.cost_profile import CostProfile, load_profile
from twinpool.cluster.costs import CostModel, DecodeCost
from twinpool.cluster.protocol.errors import LaunchError
from twinpool.cluster.sizing.calibrate import Options, calibrate, pick_pair

NOW = "2026-01-02T03:04:05+00:00"
TRUTH = {
    "prefill_overhead_s": TWO_CORES.prefill_overhead_s,
    "prefill_per_token_s": TWO_CORES.prefill_per_token_s,
    "prefill_per_token_sq_s": TWO_CORES.prefill_per_token_sq_s,
    "decode_base_s": TWO_CORES.decode.base_s,
    "decode_per_sequence_s": TWO_CORES.decode.per_sequence_s,
    "decode_per_cached_token_s": TWO_CORES.decode.per_cached_token_s,
    "transfer_latency_s": TWO_CORES.transfer_latency_s,
    "transfer_s_per_byte": 1 / TWO_CORES.transfer_bytes_per_s,
    "request_overhead_s": TWO_CORES.request_overhead_s,
    "prefill_sending_ratio": TWO_CORES.prefill_sending,
    "prefill_contention_ratio": TWO_CORES.prefill_contention,
    "decode_contention_ratio": TWO_CORES.decode_contention,
}


def calibrated(prober: SimulatedProber, options: Options | None = None) -> CostProfile:
    return calibrate(prober, options or Options(), NOW, lambda what, share: None)


def test_the_constants_come_back_and_a_second_calibration_agrees_within_the_spreads() -> None:
    """The machine of the second run is up to 2 % slower than that of the first."""
    held: list[bool] = []
    agreed: list[bool] = []
    for seed in range(12):
        first, second = (
            dict(calibrated(SimulatedProber(seed=100 * run + seed, slowdown=slower(0.02 * run))).constants.items())
            for run in (0, 1)
        )
        for key, truth in TRUTH.items():
            one, other = first[key], second[key]
            if one.median is not None:
                held.append(abs(one.median - truth) <= one.spread)
                if other.median is not None:
                    agreed.append(abs(one.median - other.median) <= one.spread + other.spread)
    assert len(held) > 0.95 * 12 * len(TRUTH)  # almost nothing is refused in ordinary jitter
    assert sum(held) / len(held) > 0.95
    assert sum(agreed) / len(agreed) > 0.97


def slower(share: float) -> Callable[[float], float]:
    return lambda now_s: 1 + share


def test_the_profile_predicts_passes_that_were_never_timed(tmp_path: Path) -> None:
    calibrated(SimulatedProber(seed=4)).save(tmp_path / "costs.json")
    model = load_profile(tmp_path / "costs.json").model()
    for num_tokens, cached in ((100, 0), (700, 0), (1500, 0), (300, 2000)):
        assert model.prefill_s(num_tokens, cached) == pytest.approx(TWO_CORES.prefill_s(num_tokens, cached), rel=0.06)
    for batch, each in ((1, 3000), (6, 300), (24, 700), (32, 100)):
        shape = (batch, batch * each)
        assert model.decode_s(*shape) == pytest.approx(TWO_CORES.decode_s(*shape), rel=0.06)
        assert model.fused_s([(0, 256)], *shape) == pytest.approx(TWO_CORES.fused_s([(0, 256)], *shape), rel=0.08)
    assert model.transfer_s(1000) == pytest.approx(TWO_CORES.transfer_s(1000), rel=0.06)


def test_it_says_of_what_the_constants_are() -> None:
    profile = calibrated(SimulatedProber(), Options(num_threads=2))
    assert profile.measured_at == NOW
    assert profile.fingerprint.model_dump() == {
        "model": "smollm2",
        "weights": PROMPT.fingerprint,
        "dtype": "bfloat16",
        "engine": "model",
        "host": "here",
        "num_threads": 2,
    }
    assert profile.completion.max_num_seqs == COMPLETION.max_num_seqs
    assert profile.kv_bytes_per_token == PROMPT.kv_bytes_per_token
    assert profile.fuse.status == "measured"


def test_a_gpu_with_two_decode_regimes_and_a_floor_comes_back() -> None:
    gpu = CostModel(
        prefill_floor_s=10.1e-3,
        prefill_overhead_s=5.35e-3,
        prefill_per_token_s=35.2e-6,
        decode=DecodeCost(10.5e-3, 20e-6, 0.09e-6),
        decode_large=DecodeCost(2e-3, 160e-6, 0.09e-6),
        decode_knee_sequences=64,
        kv_bytes_per_token=131_072,
        transfer_latency_s=0.001,
        transfer_bytes_per_s=20e9,
        request_overhead_s=0.002,
        fuse="max",
    )
    workers = [replace(worker, max_num_seqs=256, num_blocks=20_000) for worker in (PROMPT, COMPLETION)]
    profile = calibrated(SimulatedProber(gpu, seed=2, jitter=0.01, workers=workers))
    floor, knee = profile.constants.prefill_floor_s, profile.decode_knee_sequences
    assert floor.median == pytest.approx(gpu.prefill_floor_s, rel=0.05)
    assert knee == 64
    assert profile.constants.decode_large_per_sequence_s is not None
    assert profile.constants.decode_large_per_sequence_s.value == pytest.approx(160e-6, rel=0.1)
    assert profile.fuse.rule == "max"


@pytest.mark.parametrize("quick", [False, True])
def test_it_keeps_to_its_budget_and_says_what_it_left_out(quick: bool) -> None:
    """On workers four times slower the long prompts do not fit; a few repeats of the rest are made in any case."""
    usual = SimulatedProber()
    calibrated(usual, Options(budget_s=120, is_quick=quick))
    assert usual.now_s < 1.3 * 120
    slow = SimulatedProber(slowdown=slower(3.0))
    profile = calibrated(slow, Options(budget_s=120, is_quick=quick))
    assert any("left out" in note and "2,048 tokens" in note for note in profile.notes)
    assert slow.now_s < 3 * 120
    truth_s = 4 * TWO_CORES.prefill_s(200)  # short prompts bound the quadratic term only, and the bound counts
    assert 0.95 * truth_s < profile.model().prefill_s(200) < 1.4 * truth_s


def test_ordinary_jitter_passes() -> None:
    for seed in range(5):
        calibrated(SimulatedProber(seed=seed, jitter=0.08, slow_share=0.05))


@pytest.mark.parametrize(
    "slowdown",
    [
        pytest.param(lambda now_s: 1.6 if now_s > 60 else 1.0, id="from the middle on"),
        pytest.param(lambda now_s: 1.6 if now_s < 5 else 1.0, id="only at the start"),
        pytest.param(lambda now_s: 1 + now_s / 200, id="slower and slower"),
    ],
)
def test_a_machine_that_moved_is_refused(slowdown: Callable[[float], float]) -> None:
    with pytest.raises(LaunchError, match="disturbed while it was timed") as refused:
        calibrated(SimulatedProber(slowdown=slowdown))
    assert "ms at the start, in the middle and at the end" in refused.value.message
    assert "--max-disturbance" in str(refused.value)
    assert calibrated(SimulatedProber(slowdown=slowdown), Options(max_disturbance=2.0))


def test_repeats_that_scatter_are_refused() -> None:
    """A machine shared in short slices: every other second half as fast, at every control as well."""
    with pytest.raises(LaunchError, match="disturbed"):
        calibrated(SimulatedProber(jitter=0.5))


def test_workers_on_two_hosts_do_not_disturb_each_other() -> None:
    there = replace(COMPLETION, host="there")
    constants = calibrated(SimulatedProber(workers=[PROMPT, there])).constants
    for ratio in (constants.prefill_contention_ratio, constants.decode_contention_ratio):
        assert (ratio.value, ratio.n) == (1.0, 0)
        assert "share no host" in ratio.reason


def test_a_pair_on_one_host_is_preferred() -> None:
    there = replace(PROMPT, name="prompt-1", host="there")
    near = replace(COMPLETION, name="completion-1", host="there")
    pair = pick_pair(SimulatedProber(workers=[PROMPT, there, near]))
    assert (pair.prompt.name, pair.completion.name) == ("prompt-1", "completion-1")


def test_without_a_pool_it_says_what_there_is() -> None:
    with pytest.raises(LaunchError, match=r"takes a PROMPT and a COMPLETION worker; there is prompt-0 \(PROMPT\)"):
        calibrated(SimulatedProber(workers=[PROMPT]))


def test_the_fused_pass_goes_to_whichever_worker_runs_one() -> None:
    on_prompt = calibrated(SimulatedProber(fusing=["prompt-0"]))
    assert on_prompt.fuse.status == "measured"
    nowhere = calibrated(SimulatedProber(fusing=[]))
    assert nowhere.fuse.status == "assumed"
    assert any("completion-0 runs no fused pass" in note for note in nowhere.notes)


def test_progress_goes_forward_and_names_what_is_timed() -> None:
    seen: list[tuple[str, float]] = []
    calibrate(SimulatedProber(), Options(), NOW, lambda what, share: seen.append((what, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] < 1
    assert ("small requests", 0.95) in seen
