"""The planner: what it recommends in known regimes, why, and what it calls infeasible."""

import json
from dataclasses import replace

import pytest
from cost_profiles import CAPACITY, cost_profile, measured, refused
from twinpool.cluster.cost_profile import CostProfile, WorkerCapacity
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.bounds import demand_of
from twinpool.cluster.sizing.distributions import ConstantLengths, LognormalLengths, Workload, generate
from twinpool.cluster.sizing.explore import RATES, Exploration, explore, knee_per_s
from twinpool.cluster.sizing.plan import Effort, Plan, plan
from twinpool.cluster.sizing.plan_report import report
from twinpool.cluster.sizing.plan_spec import cluster_yaml
from twinpool.cluster.sizing.simulate import TEXTBOOK
from twinpool.cluster.sizing.summary import Slo
from twinpool.cluster.sizing.trials import Candidate, Limits
from twinpool.cluster.sizing.workload import Request

PROFILE = cost_profile(
    prefill_per_token_s=measured(1e-4, 2e-6), decode_per_sequence_s=measured(1e-3, 1e-5), decode_base_s=0.01
)
SLO = Slo(ttft_s=0.4, tpot_s=0.025)
QUICK = Effort(num_draws=0)
PAIRS = Limits(policies=("disaggregated",))


def workload(rate_per_s: float = 12.0, num: int = 40, seed: int = 3) -> list[Request]:
    lengths = LognormalLengths(800, 0.6), ConstantLengths(60)
    return generate(Workload(rate_per_s, *lengths, num_requests=num, seed=seed))


def cheapest(found: Plan) -> float:
    assert found.recommended is not None, found.reason
    return found.recommended.cost


@pytest.fixture(scope="module")
def usual() -> Plan:
    effort = Effort(num_draws=3)
    return plan(workload(), PROFILE, SLO, Limits(max_workers=6), more_samples=[workload(seed=4)], effort=effort)


@pytest.fixture(scope="module")
def surroundings(usual: Plan) -> Exploration:
    return explore(usual, [workload(), workload(seed=4)], PROFILE.model(), lambda candidate: None)


def long_prompts_beside_streams() -> list[Request]:
    """Two streams that decode, and a long prompt that comes in between: ten times over, without a queue."""
    lengths = ((0.0, 64), (0.0, 64), (0.1, 8192))
    return [
        Request(f"{group}-{i}", 8.0 * group + at_s, num_prompt, 96)
        for group in range(10)
        for i, (at_s, num_prompt) in enumerate(lengths)
    ]


@pytest.mark.parametrize(("overhead_s", "expected"), [(0.002, "chunked"), (0.010, "disaggregated")])
def test_the_overhead_of_a_pass_decides_between_chunks_and_two_pools(overhead_s: float, expected: str) -> None:
    """A laptop GPU: with 2 ms a pass, chunks hardly lengthen a prefill; with 10 ms a second pool is worth its cost."""
    profile = cost_profile(
        prefill_overhead_s=overhead_s,
        prefill_per_token_s=55.444e-6,
        decode_base_s=0.038283,
        decode_per_sequence_s=0.0,
        decode_per_cached_token_s=0.0,
        prompt=CAPACITY.model_copy(update={"max_num_batched_tokens": 8192}),
        completion=CAPACITY.model_copy(update={"max_num_batched_tokens": 8192}),
    )
    slo, limits = Slo(ttft_s=0.575, max_gap_s=0.045), Limits(max_workers=4, rules=TEXTBOOK)
    found = plan(long_prompts_beside_streams(), profile, slo, limits, effort=QUICK)
    assert found.recommended is not None
    assert found.recommended.candidate.policy == expected


def test_among_equals_the_flag_is_preferred_to_the_architecture() -> None:
    """At a tenth of the load both attain all, and a NORMAL worker that costs as much as a pair is still simpler."""
    limits = Limits(policies=("chunked", "disaggregated"), normal_cost=2.0)
    found = plan(workload(1.0), PROFILE, SLO, limits, effort=QUICK)
    assert found.recommended is not None
    assert found.startable is not None
    assert (found.recommended.cost, found.startable.cost) == (2.0, 2.0)
    assert found.recommended.candidate.policy == "chunked"
    assert "disaggregated costs and attains the same" in found.reason
    assert "architecture" in found.reason
    dearer = plan(workload(1.0), PROFILE, SLO, replace(limits, normal_cost=2.1), effort=QUICK)
    assert dearer.recommended is not None
    assert dearer.recommended.candidate.policy == "disaggregated"


def test_the_ranking_is_by_cost_then_goodput_per_worker(usual: Plan) -> None:
    assert usual.ranked
    keys = [(c.cost, -c.trial.goodput_per_s / c.candidate.num_workers) for c in usual.ranked]
    assert keys == sorted(keys)
    assert all(choice.trial.attainment >= SLO.attainment for choice in usual.ranked)
    assert len({choice.candidate for choice in usual.ranked}) == len(usual.ranked) <= 5


def test_nothing_ranked_would_do_with_one_worker_less(usual: Plan) -> None:
    """The plan's own evidence, looked up again: every smaller candidate that was simulated misses the SLO."""
    known = {trial.candidate: trial for trial in usual.trials}
    checked = 0
    for choice in usual.ranked:
        for smaller in choice.candidate.smaller(usual.limits):
            if smaller in known:
                checked += 1
                assert not known[smaller].meets
    assert checked


def test_the_recommended_has_headroom_and_evidence(usual: Plan) -> None:
    assert usual.recommended is not None
    assert usual.recommended.headroom is not None
    assert 1.0 <= usual.recommended.headroom < 4.0
    assert usual.recommended.candidate.sizes in usual.reason
    assert usual.stability is not None
    assert usual.stability.num_draws == 3
    assert usual.stability.num_stable <= usual.stability.num_met


def test_the_headroom_is_where_the_slo_is_missed() -> None:
    """At the factor it says, the same pools still do; 8 % above it, they do not."""
    found = plan(workload(), PROFILE, SLO, PAIRS, effort=QUICK)
    assert found.recommended is not None
    chosen, factor = found.recommended.candidate, found.recommended.headroom
    assert factor is not None
    for more, does in ((factor, True), (factor * 1.08, False)):
        requests = [replace(r, arrival_s=r.arrival_s / more) for r in workload()]
        limits = replace(PAIRS, min_prompt=chosen.num_prompt, min_completion=chosen.num_completion)
        again = plan(requests, PROFILE, SLO, replace(limits, max_workers=chosen.num_workers), effort=QUICK)
        assert again.is_feasible == does


def test_the_same_input_gives_the_same_plan() -> None:
    effort = Effort(num_draws=2)
    first, again = (json.dumps(plan(workload(num=20), PROFILE, SLO, PAIRS, effort=effort).to_json()) for _ in range(2))
    assert first == again


def test_more_load_or_a_tighter_slo_never_costs_less() -> None:
    by_rate = [cheapest(plan(workload(rate), PROFILE, SLO, PAIRS, effort=QUICK)) for rate in (4.0, 12.0, 24.0)]
    assert by_rate == sorted(by_rate)
    assert by_rate[0] < by_rate[-1]
    slos = (Slo(ttft_s=0.8, tpot_s=0.05), SLO, Slo(ttft_s=0.3, tpot_s=0.018))
    by_slo = [cheapest(plan(workload(), PROFILE, slo, PAIRS, effort=QUICK)) for slo in slos]
    assert by_slo == sorted(by_slo)


def test_a_refused_constant_is_planned_with_its_bound() -> None:
    """With zero in place of a refused constant, one decode worker would carry any load."""
    roomy = WorkerCapacity(num_blocks=1 << 13, block_size_tokens=32, max_num_seqs=1024, max_num_batched_tokens=2048)
    free, bounded = (
        cost_profile(decode_per_sequence_s=constant, decode_per_cached_token_s=0.0, completion=roomy, prompt=roomy)
        for constant in (measured(0.0), refused(1.5e-3))
    )
    requests, slo = workload(30.0), Slo(ttft_s=0.4, tpot_s=0.02)

    def num_completion(profile: CostProfile) -> int:
        found = plan(requests, profile, slo, PAIRS, effort=QUICK)
        assert found.startable is not None
        return found.startable.candidate.num_completion

    assert num_completion(free) == 1
    assert num_completion(bounded) > 1


def binding_of(profile: CostProfile, slo: Slo, requests: list[Request] | None = None) -> str:
    found = plan(requests or workload(20.0), profile, slo, PAIRS, effort=QUICK)
    assert found.recommended is not None, found.reason
    return found.recommended.binding.constraint


def test_the_prefill_queue_binds_where_prompts_cost_most() -> None:
    assert binding_of(cost_profile(prefill_per_token_s=2e-4), SLO) == "prefill queue"


def test_the_decode_batch_binds_where_each_sequence_costs_most() -> None:
    assert binding_of(cost_profile(decode_per_sequence_s=2e-3), SLO) == "decode batch"


def test_kv_binds_where_a_worker_holds_few_sequences() -> None:
    small = CAPACITY.model_copy(update={"num_blocks": 120})
    assert binding_of(cost_profile(completion=small), Slo(ttft_s=0.4, tpot_s=0.5)) == "KV"


def test_transfers_bind_where_the_link_is_slow() -> None:
    """A pair more adds a link: the KV of 800 tokens takes 0.18 s over one."""
    profile = cost_profile(transfer_s_per_byte=1e-8)
    assert binding_of(profile, Slo(ttft_s=0.4, max_gap_s=0.4)) == "transfer"


def test_nothing_binds_where_no_pool_can_be_smaller() -> None:
    assert binding_of(cost_profile(), Slo(ttft_s=2.0), workload(1.0)) == "none"


def test_an_slo_below_one_prefill_is_infeasible_at_any_size() -> None:
    found = plan(workload(), PROFILE, Slo(ttft_s=0.05, tpot_s=0.025), Limits())
    assert not found.is_feasible
    assert found.trials == ()
    assert "no pool size helps: TTFT: the prefill alone takes" in found.reason
    assert "over the limit of 50 ms" in found.reason


def test_too_few_workers_are_told_from_an_impossible_slo() -> None:
    found = plan(workload(40.0), PROFILE, SLO, replace(PAIRS, max_workers=2))
    assert not found.is_feasible
    assert "a limit of 2 workers is too low" in found.reason
    assert plan(workload(40.0), PROFILE, SLO, PAIRS, effort=QUICK).is_feasible


def test_a_policy_that_stalls_is_infeasible_alone() -> None:
    """Whole prompts go before decode steps: no number of workers keeps every gap below a prefill."""
    slo = Slo(ttft_s=2.0, max_gap_s=0.03)
    alone = plan(workload(), PROFILE, slo, Limits(max_workers=3, policies=("shared",)), effort=QUICK)
    assert not alone.is_feasible
    assert "most miss largest gap" in alone.reason
    assert plan(workload(), PROFILE, slo, PAIRS, effort=QUICK).is_feasible


def test_dearer_decode_workers_buy_more_prefill_workers() -> None:
    """Costs decide among the pairs that do; the plan never pays more than the other plan's pools would cost."""
    found = {}
    for cost in (0.2, 1.0, 5.0):
        limits = replace(PAIRS, completion_cost=cost)
        found[cost] = plan(workload(20.0), PROFILE, SLO, limits, effort=QUICK).recommended
    for cost, choice in found.items():
        for other in found.values():
            assert choice is not None
            assert other is not None
            assert choice.cost <= other.candidate.cost(replace(PAIRS, completion_cost=cost)) + 1e-9


def test_unmeasured_constants_make_a_plan_less_stable() -> None:
    """A bound far above the truth: in most draws one worker less would do, and the plan says so."""
    profile = cost_profile(decode_per_sequence_s=refused(3e-3))
    found = plan(workload(), profile, SLO, PAIRS, effort=Effort(num_draws=6))
    assert found.stability is not None
    assert found.stability.num_met == 6
    assert found.stability.num_smaller_met > 0
    assert found.stability.num_stable == 6 - found.stability.num_smaller_met
    assert f"one worker less would do in {found.stability.num_smaller_met}" in str(found.stability)


def test_nothing_to_plan_for() -> None:
    with pytest.raises(ConfigError, match="no requests"):
        plan([], PROFILE, SLO)
    with pytest.raises(ConfigError, match="no limit"):
        plan(workload(), PROFILE, Slo())
    with pytest.raises(ConfigError, match="num_ranked is 0"):
        Effort(num_ranked=0)


def test_a_model_without_spreads_has_no_stability() -> None:
    assert plan(workload(), PROFILE.model(), SLO, PAIRS).stability is None


def test_the_policy_auto_is_no_cluster_that_can_be_started() -> None:
    found = plan(workload(4.0, 20), PROFILE, SLO, Limits(policies=("auto",), max_workers=4), effort=QUICK)
    assert found.recommended is not None
    assert found.startable is None


def test_the_offered_rate_is_planned_for_and_the_drawn_one_is_called_so() -> None:
    """A draw's own rate is a matter of chance: 40 arrivals at 12 a second may take as long as at 10."""
    samples = [workload(seed=seed) for seed in (3, 4)]
    found = plan(samples[0], PROFILE, SLO, PAIRS, more_samples=samples[1:], offered_per_s=12.0, effort=QUICK)
    drawn = [demand_of(sample).rate_per_s for sample in samples]
    assert found.demand.rate_per_s == 12.0
    assert found.explanation[0].startswith(f"12 requests/s offered (drawn: {drawn[0]:.3g}, {drawn[1]:.3g})")
    assert found.recommended is not None
    assert found.recommended.trial.goodput_per_s == pytest.approx(12.0 * found.recommended.trial.attainment)
    assert "Planned for 12 requests/s" in (cluster_yaml(found, PROFILE) or "")
    around = explore(found, samples, PROFILE.model(), lambda candidate: None)
    assert [p.offered_per_s for p in around.curves[found.recommended.candidate]] == [12.0 * rate for rate in RATES]


def test_the_report_shows_the_map_the_curves_and_the_spec(usual: Plan, surroundings: Exploration) -> None:
    text = cluster_yaml(usual, PROFILE)
    page = report(usual, workload(), PROFILE, surroundings, text)
    assert usual.startable is not None
    sizes = usual.startable.candidate.num_prompt, usual.startable.candidate.num_completion
    assert surroundings.centre == sizes
    assert surroundings.attainments[sizes] == usual.startable.trial.attainment
    for wanted in ("Attainment over pool sizes", "Goodput of each policy", "tokens/s/worker", "cluster.yaml"):
        assert wanted in page
    assert f"{usual.startable.trial.attainment:.0%}" in page
    assert "num_workers:" in page
    for key, constant in PROFILE.constants.items():
        assert key in page
        assert constant.status in page


def test_the_map_agrees_with_the_plan_about_every_pair(usual: Plan, surroundings: Exploration) -> None:
    known = {trial.candidate: trial.attainment for trial in usual.trials}
    for (prompt, completion), attainment in surroundings.attainments.items():
        pair = Candidate("disaggregated", prompt, completion)
        assert known.get(pair, attainment) == attainment


def test_a_curve_has_its_knee_where_the_headroom_ends(usual: Plan, surroundings: Exploration) -> None:
    assert usual.recommended is not None
    assert usual.recommended.headroom is not None
    curve = surroundings.curves[usual.recommended.candidate]
    knee = knee_per_s(curve, SLO.attainment)
    assert knee is not None
    own = curve[RATES.index(1.0)].offered_per_s
    assert knee <= own * usual.recommended.headroom * 1.05
    assert all(point.goodput_per_s <= point.offered_per_s * (1 + 1e-9) for point in curve)


def test_the_report_of_an_infeasible_plan_gives_the_reason() -> None:
    found = plan(workload(), PROFILE, Slo(ttft_s=0.05), Limits())
    page = report(found, workload(), PROFILE, explore(found, [workload()], PROFILE.model(), lambda c: None), None)
    assert "Infeasible: no pool size helps" in page
    assert "num_workers:" not in page
