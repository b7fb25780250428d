"""What no simulated run may ever do, whatever the workload, the costs, the rules and the pools."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from twinpool.cluster.costs import Capacity, CostModel, DecodeCost
from twinpool.cluster.sizing.ledger import MAX_GAP_ERROR
from twinpool.cluster.sizing.result import Bar, Outcome, Policy, Run
from twinpool.cluster.sizing.simulate import TEXTBOOK, Pools, Rules, simulate
from twinpool.cluster.sizing.workload import Request

EPSILON_S = 2e-9  # time goes by nanoseconds

POLICIES: list[Policy] = ["shared", "chunked", "disaggregated", "auto"]
capacities = st.builds(
    Capacity,
    num_blocks=st.none() | st.integers(5, 60),
    block_size=st.sampled_from([4, 16]),
    max_num_seqs=st.none() | st.integers(1, 4),
    max_num_batched_tokens=st.none() | st.integers(2, 64),
)
costs = st.builds(
    CostModel,
    prefill_floor_s=st.sampled_from([0.0, 0.02]),
    prefill_overhead_s=st.sampled_from([0.0, 0.003]),
    prefill_per_token_s=st.sampled_from([1e-4, 1e-3]),
    prefill_per_token_sq_s=st.sampled_from([0.0, 1e-6]),
    decode=st.builds(
        DecodeCost, st.sampled_from([0.005, 0.01]), st.sampled_from([0.0, 1e-3]), st.sampled_from([0.0, 1e-5])
    ),
    fuse=st.sampled_from(["max", "sum", "roofline"]),
    transfer_latency_s=st.sampled_from([0.0, 0.002]),
    transfer_bytes_per_s=st.sampled_from([1e4, 1e6]),
    kv_bytes_per_token=st.sampled_from([0, 10]),
    request_overhead_s=st.sampled_from([0.0, 0.001]),
    prefill_contention=st.sampled_from([1.0, 1.5]),
    decode_contention=st.sampled_from([1.0, 1.3]),
    prompt=capacities,
    completion=capacities,
)
rules = st.builds(
    Rules,
    first_token=st.sampled_from(["prefill", "decode"]),
    transfer=st.sampled_from(["streamed", "after"]),
    packs_prompts=st.booleans(),
    colocated=st.booleans(),
)
shapes = st.tuples(st.integers(0, 20).map(lambda n: n / 20), st.integers(1, 150), st.integers(1, 30))
workloads = st.lists(shapes, min_size=1, max_size=12).map(
    lambda many: [Request(f"r{i}", *shape) for i, shape in enumerate(many)]
)
pools = st.builds(Pools, st.integers(1, 2), st.integers(1, 2), st.integers(1, 2))
runs = st.tuples(
    st.sampled_from(POLICIES), workloads, costs, pools, rules, st.none() | st.sampled_from([1, 8, 40])
).map(lambda given: (given, run_of(given)))
Given = tuple[Policy, list[Request], CostModel, Pools, Rules, int | None]


def run_of(given: Given) -> Run:
    """Its own assertion at the end: every block of every worker is free again."""
    policy, requests, cost, pools, rules, chunk = given
    return simulate(policy, requests, cost, pools=pools, rules=rules, chunk=chunk)


def by_resource(run: Run) -> dict[str, list[Bar]]:
    bars: dict[str, list[Bar]] = defaultdict(list)
    for bar in run.bars:
        bars[bar.resource].append(bar)
    return bars


@given(runs)
@settings(max_examples=150, deadline=None)
def test_requests_and_tokens_are_conserved(case: tuple[Given, Run]) -> None:
    (_, requests, _, _, rules, _), run = case
    assert [outcome.request for outcome in run.outcomes] == requests
    for outcome in run.outcomes:
        assert outcome.is_finished != (outcome.refused is not None)
        assert not outcome.is_finished or outcome.num_tokens == outcome.request.num_output_tokens
        assert not outcome.num_preemptions or outcome.num_tokens
    sent = [outcome for outcome in run.outcomes if outcome.num_tokens]
    assert sum(run.gaps.values()) == sum(outcome.num_tokens - 1 for outcome in sent)
    spans_s = sum((outcome.last_token_s or 0.0) - (outcome.first_token_s or 0.0) for outcome in sent)
    assert sum(gap_s * count for gap_s, count in run.gaps.items()) == pytest.approx(
        spans_s, rel=MAX_GAP_ERROR, abs=1e-6
    )
    longest_s = max((outcome.max_gap_s for outcome in run.outcomes), default=0.0)
    assert max(run.gaps, default=0.0) == pytest.approx(longest_s, rel=MAX_GAP_ERROR)
    if not any(outcome.num_preemptions or outcome.refused for outcome in run.outcomes):
        num_first = len(sent) if rules.first_token == "prefill" else 0
        assert sum(bar.num_prefill_tokens for bar in run.bars) == sum(r.num_prompt_tokens for r in requests)
        assert sum(bar.num_decode_tokens for bar in run.bars) == sum(o.num_tokens for o in sent) - num_first


@given(runs)
@settings(max_examples=150, deadline=None)
def test_time_is_accounted_for_and_nothing_is_booked_twice(case: tuple[Given, Run]) -> None:
    _, run = case
    assert sum(bar.duration_s for bar in run.bars) == pytest.approx(run.gpu_s)
    for resource, bars in by_resource(run).items():
        assert sum(bar.duration_s for bar in bars) == pytest.approx(run.busy_s[resource])
        assert all(bar.duration_s >= 0 for bar in bars)
        assert all(earlier.end_s <= later.start_s + EPSILON_S for earlier, later in pairwise(bars))
    assert all(bar.end_s <= run.end_s + EPSILON_S for bar in run.bars)


@given(runs)
@settings(max_examples=150, deadline=None)
def test_nothing_happens_before_its_cause(case: tuple[Given, Run]) -> None:
    (_, _, cost, _, rules, _), run = case
    outcomes = {outcome.request.request_id: outcome for outcome in run.outcomes if outcome.num_tokens}
    for outcome in outcomes.values():
        times_s = stage_times_s(outcome)
        assert times_s[0] >= outcome.request.arrival_s + cost.request_overhead_s - EPSILON_S
        assert all(earlier <= later + EPSILON_S for earlier, later in pairwise(times_s))
        assert outcome.first_token_s is not None
        assert outcome.prefill_end_s is not None
        if rules.first_token == "prefill":
            assert outcome.first_token_s == outcome.prefill_end_s
        else:
            assert outcome.first_token_s > outcome.prefill_end_s
    for bar in run.bars:
        for outcome in [outcomes[key] for key in bar.request_ids if key in outcomes and bar.kind == "decode"]:
            assert outcome.transfer_end_s is not None
            assert bar.start_s >= outcome.transfer_end_s - EPSILON_S
            assert bar.end_s <= (outcome.last_token_s or 0.0) + EPSILON_S


def stage_times_s(outcome: Outcome) -> list[float]:
    times = [outcome.prefill_start_s, outcome.prefill_end_s, outcome.transfer_end_s, outcome.last_token_s]
    if outcome.num_tokens == 1:  # its KV may still be on its way to nowhere
        times = times[:2]
    return [time for time in times if time is not None]


@given(runs)
@settings(max_examples=150, deadline=None)
def test_no_worker_rests_while_it_has_work(case: tuple[Given, Run]) -> None:
    """A sequence that can decode does, unless its worker prefills; a lone PROMPT worker with room prefills."""
    (policy, _, cost, pools, _, _), run = case
    if any(outcome.num_preemptions for outcome in run.outcomes) or cost.completion.max_num_batched_tokens:
        return
    rests = {name: rests_of(bars) for name, bars in by_resource(run).items()}
    for name in [name for name in rests if name.startswith(("completion", "normal"))]:
        users = {key for bar in run.bars if bar.resource == name for key in bar.request_ids}
        for outcome in [o for o in run.outcomes if o.request.request_id in users]:
            begun_s, ended_s = outcome.transfer_end_s, outcome.last_token_s
            if begun_s is not None and ended_s is not None:
                assert not [r for r in rests[name] if max(begun_s, r[0]) < min(ended_s, r[1]) - EPSILON_S]
    has_room = cost.prompt.num_blocks is None and cost.completion == Capacity(None, cost.completion.block_size)
    if policy == "disaggregated" and pools.num_prompt == 1 and has_room:
        for outcome in run.outcomes:
            come_s, begun_s = outcome.request.arrival_s + cost.request_overhead_s, outcome.prefill_start_s or 0.0
            assert not [r for r in rests.get("prompt-0", []) if max(come_s, r[0]) < min(begun_s, r[1]) - EPSILON_S]


def rests_of(bars: list[Bar]) -> list[tuple[float, float]]:
    return [(earlier.end_s, later.start_s) for earlier, later in pairwise(bars) if later.start_s > earlier.end_s]


@given(runs)
@settings(max_examples=40, deadline=None)
def test_equal_input_gives_equal_bytes(case: tuple[Given, Run]) -> None:
    given, run = case
    assert repr(run_of(given)) == repr(run)


@given(
    chunk=st.integers(16, 500),
    more=st.integers(1, 3000),
    overhead_s=st.sampled_from([0.0, 0.001, 0.03]),
    fuse=st.sampled_from(["max", "sum"]),
)
@settings(max_examples=100, deadline=None)
def test_a_chunk_shorter_than_the_prompt_shortens_the_worst_gap(
    chunk: int, more: int, overhead_s: float, fuse: str
) -> None:
    """Under either rule, without exception: in the simulator it is a theorem, only live workers can refute it."""
    cost = CostModel(
        prefill_overhead_s=overhead_s,
        prefill_per_token_s=1e-4,
        decode=DecodeCost(0.02),
        fuse="max" if fuse == "max" else "sum",
    )
    requests = [Request("stream", 0.0, 8, 60), Request("prompt", 0.1, chunk + more, 2)]
    gaps_s = [
        simulate(policy, requests, cost, rules=TEXTBOOK, chunk=chunk).outcomes[0].max_gap_s
        for policy in ("chunked", "shared")
    ]
    assert gaps_s[0] < gaps_s[1]
