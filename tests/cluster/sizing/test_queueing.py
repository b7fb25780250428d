"""Queueing theory as an oracle for the pools."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from twinpool.cluster.costs import Capacity, CostModel, DecodeCost
from twinpool.cluster.sizing.result import Run
from twinpool.cluster.sizing.simulate import Pools, Rules, simulate
from twinpool.cluster.sizing.workload import Request

FIFO = Rules(first_token="prefill", transfer="after", packs_prompts=False)
PREFILL_ONLY = CostModel(prefill_per_token_s=0.001)  # a prompt of 1,000 tokens takes a second


def poisson(num: int, rate_per_s: float, rng: random.Random) -> list[float]:
    return list(accumulate(rng.expovariate(rate_per_s) for _ in range(num)))


def prompt_sizes(kind: str, num: int, rng: random.Random) -> list[int]:
    return [1000] * num if kind == "M/D/1" else [max(1, round(rng.expovariate(0.001))) for _ in range(num)]


def expected_wait_s(kind: str, load: float) -> float:
    return load / (1 - load) * (0.5 if kind == "M/D/1" else 1.0)


def lindley_waits_s(arrivals_s: Sequence[float], service_s: Sequence[float]) -> list[float]:
    """Each waits for what its predecessor waited and took, less the time between the two."""
    gaps = (later - earlier for earlier, later in pairwise(arrivals_s))
    steps = (taken - gap for taken, gap in zip(service_s, gaps, strict=False))
    return list(accumulate(steps, lambda wait, step: max(0.0, wait + step), initial=0.0))


def prefilled(
    arrivals_s: Sequence[float], sizes: Sequence[int], cost: CostModel = PREFILL_ONLY, num_prompt: int = 1
) -> Run:
    requests = [Request(str(i), at, size, 1) for i, (at, size) in enumerate(zip(arrivals_s, sizes, strict=True))]
    pools = Pools(num_prompt=num_prompt)
    return simulate("disaggregated", requests, cost, pools=pools, rules=FIFO, keep_bars=False)


def waits_s(run: Run) -> list[float]:
    return [(outcome.prefill_start_s or 0.0) - outcome.request.arrival_s for outcome in run.outcomes]


@pytest.mark.parametrize("load", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("kind", ["M/D/1", "M/M/1"])
def test_one_prompt_worker_is_a_queue_of_theory(kind: str, load: float) -> None:
    """Each simulated wait is Lindley's; so the mean over more customers, which theory gives, is the simulator's too."""
    rng = random.Random(7)
    num_simulated, num_customers = 2500, 400_000
    arrivals_s, sizes = poisson(num_customers, load, rng), prompt_sizes(kind, num_customers, rng)
    lindley_s = lindley_waits_s(arrivals_s, [size * 0.001 for size in sizes])
    simulated_s = waits_s(prefilled(arrivals_s[:num_simulated], sizes[:num_simulated]))
    assert simulated_s == pytest.approx(lindley_s[:num_simulated], abs=1e-5)
    mean_s = sum(simulated_s + lindley_s[num_simulated:]) / num_customers
    assert mean_s == pytest.approx(expected_wait_s(kind, load), rel=0.02)


def test_two_prompt_workers_share_one_queue() -> None:
    """When the router keeps what no worker needs yet, whoever is free first gets the oldest (Kiefer and Wolfowitz)."""
    arrivals_s = poisson(3000, 1.6, random.Random(3))
    free_s, expected_s = [0.0, 0.0], list[float]()
    for arrival_s in arrivals_s:
        start_s = max(arrival_s, min(free_s))
        free_s[free_s.index(min(free_s))] = start_s + 1.0
        expected_s.append(start_s - arrival_s)
    cost = replace(PREFILL_ONLY, prompt=Capacity(max_num_batched_tokens=500))  # room for one prompt at a time
    run = prefilled(arrivals_s, [1000] * 3000, cost, num_prompt=2)
    assert waits_s(run) == pytest.approx(expected_s, abs=1e-5)


def test_littles_law_holds_in_the_prefill_pool() -> None:
    """What an arrival finds (PASTA) is the rate times the time that prompts stay."""
    arrivals_s = poisson(8000, 0.7, random.Random(5))
    run = prefilled(arrivals_s, [1000] * len(arrivals_s))
    ends_s = [outcome.prefill_end_s or 0.0 for outcome in run.outcomes]
    found, first = 0, 0
    for i, arrival_s in enumerate(arrivals_s):
        while ends_s[first] <= arrival_s:
            first += 1
        found += i - first
    stay_s = sum(end_s - arrival_s for end_s, arrival_s in zip(ends_s, arrivals_s, strict=True)) / len(arrivals_s)
    rate_per_s = len(arrivals_s) / arrivals_s[-1]
    assert found / len(arrivals_s) == pytest.approx(rate_per_s * stay_s, rel=0.03)


def test_the_decode_pool_is_in_its_closed_form() -> None:
    """TPOT = d / (1 - r (ps + pc L)), and by Little's law the mean batch, taken from the bars, is r TPOT."""
    base_s, per_sequence_s, per_token_s, prompt, output = 0.010, 2e-4, 2e-7, 500, 200
    cost = CostModel(decode=DecodeCost(base_s, per_sequence_s, per_token_s))
    arrivals_s = poisson(3000, 8.0, random.Random(11))
    requests = [Request(str(i), at, prompt, output) for i, at in enumerate(arrivals_s)]
    run = simulate("disaggregated", requests, cost, rules=FIFO)
    tokens_per_s = 8.0 * output
    tpot_s = base_s / (1 - tokens_per_s * (per_sequence_s + per_token_s * (prompt + output / 2)))
    tpots_s = [outcome.tpot_s or 0.0 for outcome in run.outcomes[300:]]
    assert sum(tpots_s) / len(tpots_s) == pytest.approx(tpot_s, rel=0.03)
    sequence_s = sum(bar.duration_s * len(bar.request_ids) for bar in run.bars if bar.kind == "decode")
    observed_per_s = sum(bar.num_decode_tokens for bar in run.bars) / arrivals_s[-1]
    assert sequence_s / arrivals_s[-1] == pytest.approx(observed_per_s * tpot_s, rel=0.03)
