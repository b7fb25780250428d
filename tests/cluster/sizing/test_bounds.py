"""The closed forms against the textbook."""

from dataclasses import replace
from heapq import heapreplace
from math import exp, factorial, inf
from random import Random
from statistics import fmean

import pytest
from twinpool.cluster.costs import Capacity, CostModel, DecodeCost
from twinpool.cluster.sizing.bounds import (
    Demand,
    decode_state,
    demand_of,
    erlang_c,
    estimate_pools,
    max_batch,
    mean_wait_s,
    prefill_state,
    transfer_load,
)
from twinpool.cluster.sizing.simulate import simulate
from twinpool.cluster.sizing.summary import Slo
from twinpool.cluster.sizing.workload import Request

COST = CostModel(
    prefill_overhead_s=0.001,
    prefill_per_token_s=1e-5,
    decode=DecodeCost(0.010, 5e-5, 1e-7),
    transfer_latency_s=0.001,
    transfer_bytes_per_s=1e9,
    kv_bytes_per_token=100_000,
    completion=Capacity(num_blocks=1000, block_size=32, max_num_seqs=64),
)


def evenly(num: int, every_s: float, num_prompt: int, num_output: int) -> list[Request]:
    return [Request(f"r{i}", i * every_s, num_prompt, num_output) for i in range(num)]


def demand(rate_per_s: float, num_prompt: int = 1000, num_output: float = 200) -> Demand:
    return Demand(rate_per_s, 1.0, (num_prompt,), num_output, num_prompt + num_output / 2)


@pytest.mark.parametrize(("servers", "load", "expected"), [(1, 0.7, 0.7), (2, 1.0, 1 / 3), (10, 8.0, 0.4092)])
def test_erlang_c_has_its_tabulated_values(servers: int, load: float, expected: float) -> None:
    assert erlang_c(servers, load) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("servers", "load"), [(3, 0.5), (7, 6.5), (30, 20.0)])
def test_erlang_c_is_its_definition(servers: int, load: float) -> None:
    last = load**servers / factorial(servers) * servers / (servers - load)
    assert erlang_c(servers, load) == pytest.approx(last / (sum(load**k / factorial(k) for k in range(servers)) + last))


def test_erlang_c_is_certain_to_wait_beyond_capacity() -> None:
    assert erlang_c(4, 4.0) == 1.0


@pytest.mark.parametrize("utilisation", [0.3, 0.5, 0.8, 0.9])
def test_the_wait_of_one_server_is_pollaczek_khinchine(utilisation: float) -> None:
    """M/M/1, M/D/1, and a service time more variable than the exponential."""
    for service_cv in (1.0, 0.0, 2.5):
        expected = 0.25 * utilisation / (1 - utilisation) * (1 + service_cv**2) / 2
        assert mean_wait_s(utilisation / 0.25, 0.25, 1, service_cv=service_cv) == pytest.approx(expected)


def test_the_wait_of_many_servers_is_erlangs_for_exponential_times() -> None:
    assert mean_wait_s(8.0, 1.0, 10) == pytest.approx(0.4092 / 2, abs=5e-5)


@pytest.mark.parametrize(("servers", "utilisation"), [(2, 0.7), (5, 0.8)])
def test_the_wait_of_many_servers_is_near_a_simulated_queue(servers: int, utilisation: float) -> None:
    """M/D/c by the recursion of Kiefer and Wolfowitz."""
    random, free_s, now_s, waits_s = Random(5), [0.0] * servers, 0.0, 0.0
    for _ in range(100_000):
        now_s += random.expovariate(utilisation * servers)
        start_s = max(now_s, free_s[0])
        heapreplace(free_s, start_s + 1.0)
        waits_s += start_s - now_s
    predicted_s = mean_wait_s(utilisation * servers, 1.0, servers, service_cv=0.0)
    assert predicted_s == pytest.approx(waits_s / 100_000, rel=0.05)


def test_a_queue_without_arrivals_or_without_capacity() -> None:
    assert mean_wait_s(0.0, 1.0, 3) == 0.0
    assert mean_wait_s(3.0, 1.0, 3) == inf
    assert mean_wait_s(inf, 1.0, 3) == inf


def test_regular_arrivals_wait_less_and_bursts_wait_more() -> None:
    waits = [mean_wait_s(4.0, 0.2, 1, service_cv=0.5, arrival_cv=cv) for cv in (0.0, 1.0, 3.0)]
    assert waits == sorted(waits)
    assert waits[2] == pytest.approx(waits[1] * (9 + 0.25) / 1.25)


def test_the_statistics_of_a_workload() -> None:
    requests = [Request("a", 0.0, 100, 10), Request("b", 1.0, 300, 30), Request("c", 4.0, 200, 20)]
    found = demand_of(requests)
    assert found.rate_per_s == pytest.approx(2 / 4)
    assert found.arrival_cv == pytest.approx(0.5)
    assert found.mean_output_tokens == 20
    assert found.mean_context_tokens == pytest.approx((10 * 105 + 30 * 315 + 20 * 210) / 60)
    assert demand_of(requests[:1]).rate_per_s == 0.0
    assert demand_of(evenly(3, 0.0, 1, 1)).rate_per_s == inf


def test_the_prefill_pool_is_an_m_d_c_queue_for_equal_prompts() -> None:
    cost = replace(COST, request_overhead_s=0.002)
    state = prefill_state(demand(50.0), cost, 1)
    assert state.service_s == pytest.approx(0.011)
    assert state.utilisation == pytest.approx(0.55)
    assert state.ttft_s == pytest.approx(0.002 + 0.011 + 0.011 * 0.55 / (2 * 0.45))


def test_the_decode_state_is_a_fixed_point() -> None:
    """The step of a batch that the step's own length gathers is that step, and the batch is r times it."""
    state = decode_state(demand(10.0), COST, 2)
    assert state.step_s == pytest.approx(COST.decode_s(1, 0) - 5e-5 + state.num_sequences * (5e-5 + 1e-7 * 1100))
    assert state.num_sequences == pytest.approx(1000 * state.step_s)


@pytest.mark.parametrize("num_streams", [1.2, 5.0, 18.0, 42.0])
def test_the_decode_state_is_that_of_the_simulator(num_streams: float) -> None:
    """Even arrivals, one worker; measured away from the start and from the end, where batches are smaller."""
    cost = CostModel(decode=DecodeCost(0.010, 1e-4, 2e-7))
    every_s = 200 * (0.010 + num_streams * 3.2e-4) / num_streams
    requests = evenly(int(60 / every_s), every_s, 1000, 200)
    run = simulate("disaggregated", requests, cost, keep_bars=False)
    tpots_s = [outcome.tpot_s for outcome in run.outcomes if 25 < outcome.request.arrival_s < 50]
    state = decode_state(demand_of(requests), cost, 1)
    assert state.num_sequences == pytest.approx(num_streams, rel=1e-6)
    assert state.step_s == pytest.approx(fmean(tpot_s for tpot_s in tpots_s if tpot_s is not None), rel=0.021)


def test_a_decode_pool_that_cannot_keep_up_with_its_sequences() -> None:
    assert not decode_state(demand(40.0), COST, 1).is_stable
    assert decode_state(demand(40.0), COST, 2).is_stable


def test_the_second_regime_takes_over_from_its_knee() -> None:
    cost = replace(COST, decode_large=DecodeCost(0.002, 1e-4, 1e-7), decode_knee_sequences=8)
    small, large = decode_state(demand(1.0), cost, 1), decode_state(demand(15.0), cost, 1)
    assert small == decode_state(demand(1.0), COST, 1)
    assert large.num_sequences > 8
    assert large.step_s == pytest.approx(0.002 / (1 - 3000 * (1e-4 + 1e-7 * 1100)))


def test_the_batch_is_limited_by_kv_or_by_its_own_limit() -> None:
    assert max_batch(demand(1.0, 1000, 200), COST) == pytest.approx(32_000 / 1100)
    assert max_batch(demand(1.0, 100, 20), COST) == 64
    assert max_batch(demand(1.0), CostModel()) == inf


def test_the_load_of_a_link_counts_its_latency() -> None:
    assert transfer_load(demand(2.0), COST, 4) == pytest.approx(2 * (0.001 + 0.1) / 4)


def test_the_estimate_keeps_below_the_utilisation_limit_and_within_the_slo() -> None:
    slo = Slo(ttft_s=0.1, tpot_s=0.02)
    asked = demand(200.0, 1000, 20)
    estimate = estimate_pools(asked, COST, slo, 64)
    assert estimate.num_prompt == 3  # 2.2 workers busy: 3 are busy to 73 %
    assert estimate.num_completion is not None
    state = decode_state(asked, COST, estimate.num_completion)
    assert state.step_s <= 0.02
    assert state.num_sequences <= max_batch(asked, COST)
    smaller = decode_state(asked, COST, estimate.num_completion - 1)
    assert smaller.step_s > 0.02 or smaller.num_sequences > max_batch(asked, COST)


def test_no_estimate_is_given_where_the_limit_of_workers_is_too_small() -> None:
    assert estimate_pools(demand(1000.0), COST, Slo(ttft_s=0.1, tpot_s=0.02), 3).num_completion is None


def test_a_refused_constant_cannot_make_one_worker_carry_everything() -> None:
    """The per-sequence cost was refused: with its bound the batch is limited, with 0 it would not be."""
    free = replace(COST, decode=DecodeCost(0.010), completion=Capacity())
    asked, slo = demand(100.0), Slo(tpot_s=0.05)
    assert estimate_pools(asked, free, slo, 99).num_completion == 1
    bounded = estimate_pools(asked, replace(free, decode=DecodeCost(0.010, 0.0, 5e-7)), slo, 99).num_completion
    assert bounded is not None
    assert bounded > 10


def test_the_own_numbers_of_a_poisson_queue_hold() -> None:
    """M/M/1 has an exponential wait: P(W > t) = ρ exp(-(μ-λ)t), whose mean is what `mean_wait_s` says."""
    rate, service_s = 3.0, 0.25
    tail = [rate * service_s * exp(-(1 / service_s - rate) * t / 1000) / 1000 for t in range(20_000)]
    assert mean_wait_s(rate, service_s, 1) == pytest.approx(sum(tail), rel=1e-3)
