"""What no schedule can beat: reasons with their numbers, and bounds that no simulated pool undercuts."""

from dataclasses import replace

import pytest
from twinpool.cluster.costs import Capacity, CostModel, DecodeCost
from twinpool.cluster.sizing.floors import min_completion_workers, min_prompt_workers, served_alone
from twinpool.cluster.sizing.summary import Slo
from twinpool.cluster.sizing.workload import Request

COST = CostModel(
    prefill_overhead_s=0.001,
    prefill_per_token_s=1e-5,
    decode=DecodeCost(0.010, 5e-5, 1e-7),
    completion=Capacity(num_blocks=1000, block_size=32, max_num_seqs=64),
)


def evenly(num: int, every_s: float, num_prompt: int, num_output: int) -> list[Request]:
    return [Request(f"r{i}", i * every_s, num_prompt, num_output) for i in range(num)]


def test_requests_that_even_an_idle_cluster_serves_too_late() -> None:
    requests = [*evenly(80, 0.1, 1000, 10), *evenly(20, 0.1, 60_000, 10)]
    alone = served_alone(requests, replace(COST, completion=Capacity()), Slo(ttft_s=0.5, tpot_s=0.02))
    assert alone.attainment == pytest.approx(0.8)
    assert len(alone.reasons) == 1
    assert "TTFT: the prefill alone takes 601 ms, over the limit of 500 ms; 90% of" in alone.reasons[0]
    assert alone.reasons[0].endswith("60,000 prompt tokens")


@pytest.mark.parametrize(("slo", "name"), [(Slo(tpot_s=0.009), "TPOT"), (Slo(max_gap_s=0.009), "largest gap")])
def test_a_limit_below_one_decode_step(slo: Slo, name: str) -> None:
    alone = served_alone(evenly(10, 1.0, 1000, 200), COST, slo)
    assert alone.attainment == 0.0
    assert f"{name}: a decode step alone takes 10.2 ms, over the limit of 9 ms" in alone.reasons[0]


def test_the_itl_limit_is_one_of_the_whole_run() -> None:
    """One gap in a hundred may be longer, whosever it is; with one more, every request has missed."""
    within, over = evenly(99, 1.0, 1000, 101), evenly(1, 1.0, 20_000, 101)
    slo = Slo(itl_p99_s=0.011)
    assert served_alone([*within, *over], COST, slo).attainment == 1.0
    alone = served_alone([*within[1:], *over], COST, slo)
    assert alone.attainment == 0.0
    assert "100 of the 9,900 gaps are over the limit of 11 ms" in alone.reasons[0]


def test_a_request_that_no_kv_cache_holds() -> None:
    alone = served_alone(evenly(10, 1.0, 32_000, 200), COST, Slo(ttft_s=1.0))
    assert "KV: a COMPLETION worker's cache holds 32,000 tokens" in alone.reasons[0]
    assert alone.reasons[0].endswith("32,000 prompt and 200 output tokens")


def test_limits_that_only_together_cannot_be_met() -> None:
    """A tenth misses one limit and another tenth the other: each limit alone would be met."""
    long_prompts = evenly(10, 1.0, 90_000, 1)
    long_outputs = evenly(10, 1.0, 1000, 100_000)
    requests = [*evenly(80, 1.0, 1000, 10), *long_prompts, *long_outputs]
    alone = served_alone(requests, replace(COST, completion=Capacity()), Slo(ttft_s=0.5, tpot_s=0.012))
    assert alone.attainment == pytest.approx(0.8)
    assert alone.reasons == ("different requests miss different limits, together more than are allowed to",)


def test_single_tokens_need_no_decode_step() -> None:
    assert served_alone(evenly(10, 1.0, 100, 1), COST, Slo(tpot_s=0.001)).attainment == 1.0


def test_the_least_prompt_workers_are_those_that_the_tokens_alone_keep_busy() -> None:
    """90 of 100 prompts must be done within 99 · 0.01 s + 0.5 s, and each is 0.1 s of work beside the overhead."""
    requests = evenly(100, 0.01, 10_000, 10)
    slo = Slo(ttft_s=0.5)
    assert min_prompt_workers(requests, replace(COST, prompt=Capacity()), slo) == 7  # 9.0 / 1.49
    assert min_prompt_workers(requests, replace(COST, prompt=Capacity(max_num_batched_tokens=100)), slo) == 13
    assert min_prompt_workers(requests, COST, Slo(tpot_s=1.0)) == 1


def test_the_least_completion_workers_count_full_batches() -> None:
    requests = evenly(1000, 0.001, 1000, 201)
    per_token_s = 0.010 / 64 + 5e-5 + 1e-7 * 1100.5
    work_s, time_s = 900 * 200 * per_token_s, 0.999 + 0.5 + 201 * 0.02
    assert min_completion_workers(requests, COST, Slo(ttft_s=0.5, tpot_s=0.02)) == int(work_s / time_s) + 1
    assert min_completion_workers(requests, COST, Slo(ttft_s=0.5)) == 1
