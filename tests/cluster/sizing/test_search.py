"""The search: few simulations, and none of the answers that trying everything gives is missed."""

from itertools import product

import pytest
from cost_profiles import cost_profile, measured
from twinpool.cluster.costs import CostModel
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.bounds import demand_of
from twinpool.cluster.sizing.distributions import ConstantLengths, LognormalLengths, Workload, generate
from twinpool.cluster.sizing.floors import min_completion_workers, min_prompt_workers
from twinpool.cluster.sizing.search import chunk_sizes, search, smallest
from twinpool.cluster.sizing.summary import Slo
from twinpool.cluster.sizing.trials import Candidate, Limits, Trials
from twinpool.cluster.sizing.workload import Request

COST = cost_profile(prefill_per_token_s=1e-4, decode_per_sequence_s=1e-3).model()
SLO = Slo(ttft_s=0.4, tpot_s=0.025)


def workload(rate_per_s: float = 12.0, num: int = 80) -> list[Request]:
    return generate(Workload(rate_per_s, LognormalLengths(800, 0.6), ConstantLengths(60), num_requests=num, seed=3))


def trials(limits: Limits, cost: CostModel = COST, requests: list[Request] | None = None) -> Trials:
    return Trials([requests or workload()], cost, SLO, limits, lambda candidate: None)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 16), (3, 9)])
def test_the_smallest_is_found_from_every_start(low: int, high: int) -> None:
    for threshold, first in product(range(low - 1, high + 2), range(low - 2, high + 3)):
        asked: list[int] = []

        def meets(number: int, threshold: int = threshold, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number >= threshold

        assert smallest(meets, low, high, first) == (max(low, threshold) if threshold <= high else None)
        assert len(asked) == len(set(asked))
        assert all(low <= number <= high for number in asked)


def test_an_empty_range_has_no_smallest() -> None:
    assert smallest(lambda number: True, 3, 2, 3) is None


def test_the_walk_finds_the_cheapest_pair_that_trying_all_finds() -> None:
    limits = Limits(max_workers=8, policies=("disaggregated",), completion_cost=1.5)
    walked, everything = trials(limits), trials(limits)
    search(walked, demand_of(workload()))
    all_pairs = [Candidate("disaggregated", p, d) for p in range(1, 8) for d in range(1, 9 - p)]
    met = [pair for pair in all_pairs if everything(pair).meets]
    assert met
    found = [trial.candidate for trial in walked.all() if trial.meets]
    assert min(pair.cost(limits) for pair in found) == min(pair.cost(limits) for pair in met)
    assert len(walked.all()) < len(all_pairs) / 2


def test_attainment_rises_with_the_decode_pool() -> None:
    """What bisection relies on, up to the few requests that another placement moves across a limit.

    It need not rise with the prefill pool: a slow one keeps an overloaded decode pool's batches small.
    """
    tried = trials(Limits(max_workers=8))
    for prompt, completion in product((1, 2, 3), (1, 2, 3)):
        here = tried(Candidate("disaggregated", prompt, completion)).attainment
        assert tried(Candidate("disaggregated", prompt, completion + 1)).attainment >= here - 0.03


def test_no_pair_below_the_bounds_meets_the_slo() -> None:
    """The bounds exclude only what the simulator would refuse as well."""
    requests = workload(rate_per_s=60.0)
    low_prompt, low_completion = min_prompt_workers(requests, COST, SLO), min_completion_workers(requests, COST, SLO)
    assert low_prompt > 1
    tried = trials(Limits(max_workers=30), requests=requests)
    assert not tried(Candidate("disaggregated", low_prompt - 1, 16)).meets
    assert low_completion == 1 or not tried(Candidate("disaggregated", 16, low_completion - 1)).meets


def test_bounds_beyond_the_limit_leave_nothing_to_try() -> None:
    requests = workload(rate_per_s=200.0)
    tried = trials(Limits(max_workers=3), requests=requests)
    low_prompt, low_completion = search(tried, demand_of(requests))
    assert low_prompt + low_completion > 3
    assert [t for t in tried.all() if t.candidate.policy == "disaggregated"] == []


def test_auto_is_not_held_to_the_prefill_bound() -> None:
    """Its COMPLETION workers prefill too: one PROMPT worker may do where the prompts keep two busy."""
    requests = workload(rate_per_s=24.0)
    assert min_prompt_workers(requests, COST, SLO) > 1
    tried = trials(Limits(max_workers=6, policies=("auto",)), requests=requests)
    search(tried, demand_of(requests))
    assert min(trial.candidate.num_prompt for trial in tried.all()) == 1


def test_the_chunk_sizes_are_c_star_what_the_slo_allows_and_the_usual() -> None:
    cost = cost_profile(prefill_overhead_s=0.002, prefill_per_token_s=1e-5, decode_per_cached_token_s=1e-9).model()
    demand = demand_of([Request(f"r{i}", i * 1.0, 3000, 20) for i in range(10)])
    sizes = chunk_sizes(demand, cost, Slo(tpot_s=0.020), 2)
    assert sizes == [None, int((0.020 - 0.002) / 1e-5), 512, 2048]


def test_c_star_is_left_out_where_a_pass_costs_more_than_a_step() -> None:
    cost = cost_profile(prefill_overhead_s=0.030, prefill_per_token_s=1e-5).model()
    assert None not in chunk_sizes(demand_of(workload()), cost, SLO, 2)


def test_chunks_are_no_longer_than_prompts_or_the_budget() -> None:
    demand = demand_of([Request(f"r{i}", i * 1.0, 300, 20) for i in range(10)])
    assert chunk_sizes(demand, COST, Slo(tpot_s=10.0), 2) == [None, 300]


def test_each_candidate_is_simulated_once_and_all_on_the_same_requests() -> None:
    seen: list[Candidate] = []
    tried = Trials([workload(), workload(8.0)], COST, SLO, Limits(), seen.append)
    first = tried(Candidate("disaggregated", 2, 2))
    assert tried(Candidate("disaggregated", 2, 2)) is first
    assert seen == [first.candidate]
    assert [summary.num_arrived for summary in first.summaries] == [80, 80]
    assert first.attainment == pytest.approx(sum(s.slo_attainment or 0.0 for s in first.summaries) / 2)


def test_a_higher_rate_is_the_same_requests_closer_together() -> None:
    tried = trials(Limits())
    candidate = Candidate("disaggregated", 1, 1)
    slow, fast = tried(candidate).summaries[0], tried.variant(candidate, rate=2.0).summaries[0]
    assert fast.arrivals_per_s == pytest.approx(2 * (slow.arrivals_per_s or 0.0))
    assert fast.slo_attainment is not None
    assert slow.slo_attainment is not None
    assert fast.slo_attainment < slow.slo_attainment


def test_busy_shares_are_of_every_resource_of_a_kind() -> None:
    """One worker's prefill is the sum of all passes; two have half the share each."""
    requests = [Request(f"r{i}", i * 0.5, 1000, 10) for i in range(20)]
    cost = cost_profile(prefill_overhead_s=measured(0.0), prefill_per_token_s=1e-4).model()
    one = Trials([requests], cost, SLO, Limits(), lambda candidate: None)(Candidate("disaggregated", 1, 1))
    two = Trials([requests], cost, SLO, Limits(), lambda candidate: None)(Candidate("disaggregated", 2, 1))
    assert one.busy_shares["prompt"] == pytest.approx(0.2, rel=0.05)
    assert two.busy_shares["prompt"] == pytest.approx(one.busy_shares["prompt"] / 2)
    assert set(one.busy_shares) == {"prompt", "completion", "link"}


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_workers": 0}, "max_workers is 0, must be at least 1"),
        ({"min_prompt": 0}, "min_prompt is 0"),
        ({"prompt_cost": -1.0}, "prompt_cost is -1.0, must be greater than 0"),
        ({"policies": ()}, "no policy is allowed"),
        ({"max_workers": 3, "min_prompt": 2, "min_completion": 2}, "the least pools allowed have 4 workers"),
    ],
)
def test_impossible_limits_are_refused(limits: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Limits(**limits)  # pyright: ignore[reportArgumentType]


def test_what_is_left_without_one_worker() -> None:
    limits = Limits(min_completion=2)
    assert list(Candidate("disaggregated", 3, 2).smaller(limits)) == [Candidate("disaggregated", 2, 2)]
    assert list(Candidate("chunked", num_normal=2, chunk=512).smaller(limits)) == [
        Candidate("chunked", num_normal=1, chunk=512)
    ]
    assert list(Candidate("shared", num_normal=1).smaller(limits)) == []
