"""What the simulator does to each request: against a step-by-step reference, and in cases worked out by hand."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from twinpool.cluster.costs import Capacity, CostModel, DecodeCost
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.result import Policy, Run
from twinpool.cluster.sizing.simulate import TEXTBOOK, Pools, Rules, simulate
from twinpool.cluster.sizing.workload import Request

SLOW = CostModel(prefill_per_token_s=0.01, decode=DecodeCost(0.1))
ONE_BY_ONE = Rules(transfer="after", packs_prompts=False)
GROWING = CostModel(
    prefill_floor_s=0.02,
    prefill_overhead_s=0.005,
    prefill_per_token_s=1e-4,
    prefill_per_token_sq_s=2e-8,
    decode=DecodeCost(0.01, 4e-4, 3e-6),
    decode_large=DecodeCost(0.008, 7e-4, 3e-6),
    decode_knee_sequences=6,
    fuse="roofline",
    transfer_latency_s=0.001,
    transfer_bytes_per_s=1e6,
    kv_bytes_per_token=100,
)


def workload(seed: int, num: int = 40, rate_per_s: float = 4.0) -> list[Request]:
    rng, now, requests = random.Random(seed), 0.0, list[Request]()
    for i in range(num):
        now += rng.expovariate(rate_per_s)
        requests.append(Request(str(i), now, rng.randint(1, 600), rng.randint(1, 80)))
    return requests


def decode_reference(ready: list[tuple[float, Request]], cost: CostModel) -> dict[str, list[float]]:
    """Decode one step at a time; return when each token came. A request joins at the first boundary after `ready`."""
    waiting, running, now = sorted(ready, key=lambda pair: pair[0]), list[Request](), 0.0
    times: dict[str, list[float]] = {request.request_id: [] for _, request in ready}
    while waiting or running:
        while waiting and waiting[0][0] <= now:
            running.append(waiting.pop(0)[1])
        if not running:
            now = waiting[0][0]
            continue
        cached = sum(request.num_prompt_tokens + len(times[request.request_id]) for request in running)
        now += cost.decode_s(len(running), cached)
        for request in running:
            times[request.request_id].append(now)
        running = [r for r in running if len(times[r.request_id]) < r.num_output_tokens]
    return times


def split_reference(requests: list[Request], cost: CostModel) -> dict[str, list[float]]:
    free_s, link_s, ready = 0.0, 0.0, list[tuple[float, Request]]()
    for request in requests:
        free_s = max(free_s, request.arrival_s) + cost.prefill_s(request.num_prompt_tokens)
        link_s = max(free_s, link_s) + cost.transfer_s(request.num_prompt_tokens)
        ready.append((link_s, request))
    return decode_reference(ready, cost)


def mixed_reference(requests: list[Request], cost: CostModel, chunk: int | None) -> dict[str, list[float]]:
    """One worker: the oldest prompt alone and whole, or a chunk of it beside the decodes; one pass at a time."""
    coming, waiting, running, now = list(requests), list[Request](), list[Request](), 0.0
    done = dict.fromkeys((request.request_id for request in requests), 0)
    times: dict[str, list[float]] = {request.request_id: [] for request in requests}
    while coming or waiting or running:
        while coming and coming[0].arrival_s <= now:
            waiting.append(coming.pop(0))
        if not waiting and not running:
            now = coming[0].arrival_s
            continue
        decoding = running if chunk or not waiting else []
        rows: list[tuple[int, int]] = []
        if waiting:
            before = done[waiting[0].request_id]
            rows = [(before, min(chunk or 10**9, waiting[0].num_prompt_tokens - before))]
            done[waiting[0].request_id] += rows[0][1]
        cached = sum(request.num_prompt_tokens + len(times[request.request_id]) for request in decoding)
        now += cost.fused_s(rows, len(decoding), cached)
        for request in decoding:
            times[request.request_id].append(now)
        running = [r for r in running if len(times[r.request_id]) < r.num_output_tokens]
        if waiting and done[waiting[0].request_id] == waiting[0].num_prompt_tokens:
            running = [*running, waiting.pop(0)]
    return times


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("policy", "chunk"), [("shared", None), ("chunked", 64), ("disaggregated", None)])
def test_runs_of_steps_equal_single_steps(policy: Policy, chunk: int | None, seed: int) -> None:
    """Steps that grow with the cache, two regimes, a floor: every token's time is that of a loop over single steps."""
    requests = workload(seed)
    run = simulate(policy, requests, GROWING, rules=TEXTBOOK, chunk=chunk)
    split = policy == "disaggregated"
    times = split_reference(requests, GROWING) if split else mixed_reference(requests, GROWING, chunk)
    for outcome in run.outcomes:
        expected = times[outcome.request.request_id]
        assert [outcome.first_token_s, outcome.last_token_s] == pytest.approx([expected[0], expected[-1]], abs=1e-6)
        gaps = [later - earlier for earlier, later in pairwise(expected)]
        assert outcome.max_gap_s == pytest.approx(max(gaps, default=0.0), abs=1e-6)
    every_gap = sorted(b - a for ts in times.values() for a, b in pairwise(ts))
    counted = sorted(gap_s for gap_s, count in run.gaps.items() for _ in range(count))
    assert counted == pytest.approx(every_gap, rel=1.3e-4)


def test_a_preempted_request_is_prefilled_again_with_its_outputs() -> None:
    """Five blocks of four: both fit until both need a third block; the newer one waits for the older to end."""
    cost = replace(SLOW, completion=Capacity(num_blocks=5, block_size=4))
    requests = [Request("old", 0.0, 7, 10), Request("new", 0.0, 7, 10)]
    run = simulate("disaggregated", requests, cost, rules=ONE_BY_ONE)
    old, new = run.outcomes
    assert [old.num_preemptions, new.num_preemptions] == [0, 1]
    assert [old.first_token_s, old.last_token_s] == pytest.approx([0.07, 0.97])
    assert [new.first_token_s, new.last_token_s, new.max_gap_s] == pytest.approx([0.14, 1.76, 1.06 - 0.27])
    assert [bar.num_prefill_tokens for bar in run.bars if bar.kind == "prefill"] == [7, 7, 9]


def test_a_request_that_can_never_fit_is_refused_and_disturbs_nobody() -> None:
    cost = replace(SLOW, completion=Capacity(num_blocks=4, block_size=4))
    fitting = Request("fits", 0.1, 15, 1)
    alone = simulate("disaggregated", [fitting], cost)
    run = simulate("disaggregated", [Request("huge", 0.0, 16, 1), fitting], cost)
    assert run.outcomes[0].refused == "its tokens do not fit into 4 blocks of 4"
    assert run.outcomes[0].first_token_s is None
    assert (run.outcomes[1], run.bars, run.gaps) == (alone.outcomes[0], alone.bars, alone.gaps)


def test_a_request_that_outgrows_its_worker_is_refused_then() -> None:
    """15 + 1 tokens fill the worker: the second token is the last there was room to compute."""
    cost = replace(SLOW, completion=Capacity(num_blocks=4, block_size=4))
    outcome = simulate("disaggregated", [Request("grows", 0.0, 15, 5)], cost).outcomes[0]
    assert outcome.refused == "its tokens do not fit into 4 blocks of 4"
    assert (outcome.num_tokens, outcome.is_finished) == (2, False)


@pytest.mark.parametrize(("transfer", "bytes_per_s", "arrives_s"), [
    ("after", 20_000.0, 0.1 + 0.002 + 0.05),
    ("streamed", 20_000.0, 0.1 + 0.002 + 0.025),  # the last pass's 500 bytes go after its end
    ("after", 500.0, 0.1 + 0.002 + 2.0),
    ("streamed", 500.0, 0.0 + 0.002 + 2.0),  # the link was busy from the start
])  # fmt: skip
def test_streaming_hides_the_transfer_behind_the_prefill(transfer: Any, bytes_per_s: float, arrives_s: float) -> None:
    cost = CostModel(
        prefill_per_token_s=0.001,
        decode=DecodeCost(0.01),
        transfer_latency_s=0.002,
        transfer_bytes_per_s=bytes_per_s,
        kv_bytes_per_token=10,
        prompt=Capacity(max_num_batched_tokens=50),
    )
    run = simulate("disaggregated", [Request("r", 0.0, 100, 3)], cost, rules=Rules(transfer=transfer))
    assert run.outcomes[0].transfer_end_s == pytest.approx(arrives_s)
    assert run.busy_s["prompt-0→completion-0"] == pytest.approx(cost.transfer_s(100))
    assert run.outcomes[0].last_token_s == pytest.approx(arrives_s + 0.02)


def test_a_link_carries_one_transfer_at_a_time_and_links_do_not_wait_for_each_other() -> None:
    cost = replace(SLOW, transfer_bytes_per_s=100.0, kv_bytes_per_token=3)  # ten tokens: 0.1 s to compute, 0.3 to send
    requests = [Request("a", 0.0, 10, 2), Request("b", 0.0, 10, 2)]
    for num_completion, second_s in ((1, 0.7), (2, 0.5)):
        pools = Pools(num_completion=num_completion)
        run = simulate("disaggregated", requests, cost, pools=pools, rules=ONE_BY_ONE)
        assert [outcome.transfer_end_s for outcome in run.outcomes] == pytest.approx([0.4, second_s])


def test_prefill_and_decode_slow_each_other_down_on_one_host() -> None:
    """Steps begun during a prefill take 1.5 times as long; a prefill advances at half speed while a step runs."""
    cost = replace(SLOW, prefill_contention=2.0, decode_contention=1.5)
    requests = [Request("a", 0.0, 10, 6), Request("b", 0.15, 8, 1), Request("c", 0.6, 10, 1)]
    rules = Rules(packs_prompts=False, colocated=True)
    a, b, c = simulate("disaggregated", requests, cost, rules=rules).outcomes
    assert [a.first_token_s, a.last_token_s, a.max_gap_s] == pytest.approx([0.1, 0.65, 0.15])
    assert b.first_token_s == pytest.approx(0.15 + 0.08 * 2)
    assert c.first_token_s == pytest.approx(0.65 + (0.1 - 0.05 / 2))
    apart = simulate("disaggregated", requests, cost, rules=Rules(packs_prompts=False)).outcomes
    assert [o.last_token_s for o in apart] == pytest.approx([0.6, 0.23, 0.7])


def auto_run(policy: Policy, num_output_tokens: int) -> Run:
    cost = CostModel(prefill_per_token_s=0.001, decode=DecodeCost(0.05))  # C* is 50 tokens
    requests = [
        Request("stream", 0.0, 10, 100),
        Request("long", 0.2, 3000, num_output_tokens),
        Request("short", 0.5, 10, num_output_tokens),
    ]
    return simulate(policy, requests, cost)


def test_auto_lets_a_short_prompt_ride_with_the_decodes_when_prefill_workers_are_busy() -> None:
    """Nothing slows down for it, and the decision does not depend on how long the answers become."""
    for num_output_tokens in (2, 60):
        split, auto = auto_run("disaggregated", num_output_tokens), auto_run("auto", num_output_tokens)
        assert (split.outcomes[2].ttft_s or 0.0) > 2.5
        assert (auto.outcomes[2].ttft_s or 9.9) < 0.11
        assert auto.outcomes[0].max_gap_s == pytest.approx(0.05)
        places = {key: bar.resource for bar in auto.bars if bar.num_prefill_tokens for key in bar.request_ids[:1]}
        assert places == {"stream": "prompt-0", "long": "prompt-0", "short": "completion-0"}


def test_auto_splits_a_prompt_that_would_slow_the_decodes() -> None:
    """Under the sum rule a fused pass of 30 tokens takes 1.6 steps: it waits for a PROMPT worker instead."""
    cost = CostModel(prefill_per_token_s=0.001, decode=DecodeCost(0.05), fuse="sum")
    requests = [Request("stream", 0.0, 10, 100), Request("long", 0.2, 3000, 2), Request("short", 0.5, 30, 2)]
    run = simulate("auto", requests, cost)
    assert {bar.kind for bar in run.bars if bar.resource == "completion-0"} == {"decode"}


def test_several_prompts_share_a_pass_within_the_budget() -> None:
    """30 prompts of 10 tokens behind one that runs: packed into passes of 100."""
    cost = replace(SLOW, prompt=Capacity(max_num_batched_tokens=100))
    requests = [Request(str(i), 0.0 if not i else 0.05, 10, 1) for i in range(31)]
    packed = [bar.num_prefill_tokens for bar in simulate("disaggregated", requests, cost).bars]
    assert packed == [10, 100, 100, 100]
    single = simulate("disaggregated", requests, cost, rules=ONE_BY_ONE)
    assert [bar.num_prefill_tokens for bar in single.bars] == [10] * 31


def test_a_full_batch_makes_requests_wait_at_the_router() -> None:
    cost = replace(SLOW, completion=Capacity(max_num_seqs=1))
    run = simulate("disaggregated", [Request("a", 0.0, 10, 3), Request("b", 0.0, 10, 3)], cost)
    assert run.outcomes[1].prefill_start_s == run.outcomes[0].last_token_s == pytest.approx(0.3)


def test_the_way_to_the_router_is_added_once() -> None:
    requests = workload(1)
    runs = [simulate("shared", requests, replace(GROWING, request_overhead_s=s), rules=TEXTBOOK) for s in (0.0, 0.5)]
    for near, far in zip(runs[0].outcomes, runs[1].outcomes, strict=True):
        assert far.ttft_s == pytest.approx((near.ttft_s or 0.0) + 0.5)
        assert far.tpot_s == pytest.approx(near.tpot_s)


def test_packed_prompts_arrive_and_join_together() -> None:
    cost = replace(SLOW, prompt=Capacity(max_num_batched_tokens=100), kv_bytes_per_token=1, transfer_bytes_per_s=100.0)
    requests = [Request("first", 0.0, 10, 1), Request("a", 0.05, 10, 3), Request("b", 0.05, 20, 3)]
    run = simulate("disaggregated", requests, cost)
    assert [outcome.transfer_end_s for outcome in run.outcomes[1:]] == pytest.approx([0.4 + 0.2] * 2)
    assert [bar.request_ids for bar in run.bars if bar.kind == "decode"] == [("a", "b")]


def test_a_run_ends_with_its_last_token_although_it_was_once_expected_later() -> None:
    """A long run of slowed steps is cut short when the prefill that slows them ends."""
    cost = replace(SLOW, decode_contention=3.0)
    requests = [Request("a", 0.0, 10, 50), Request("b", 0.15, 10, 1)]
    run = simulate("disaggregated", requests, cost, rules=Rules(colocated=True))
    assert run.end_s == run.outcomes[0].last_token_s == pytest.approx(0.1 + 48 * 0.1 + 0.3)


def test_without_bars_everything_else_is_the_same() -> None:
    requests = workload(2)
    full, lean = (simulate("disaggregated", requests, GROWING, keep_bars=keep) for keep in (True, False))
    assert lean.bars == []
    assert (lean.outcomes, lean.gaps, lean.end_s) == (full.outcomes, full.gaps, full.end_s)
    assert lean.busy_s == pytest.approx(full.busy_s)


def test_another_process_gets_the_same_bytes() -> None:
    """Whatever order its sets and hashes have."""
    code = (
        "from twinpool.cluster.sizing import CostModel, Request, simulate\n"
        "from twinpool.cluster.costs import Capacity, DecodeCost\n"
        "cost = CostModel(0.0, 0.01, 1e-3, decode=DecodeCost(0.01, 1e-4, 1e-6), completion=Capacity(30, 4, 3))\n"
        "print(simulate('auto', [Request(f'r{i}', i / 50, 5 + i, 20) for i in range(20)], cost))"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert outputs[0].stdout.startswith(b"Run("), outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout


GOOD: dict[str, Any] = {"policy": "disaggregated", "requests": [Request("r", 0.0, 5, 5)], "cost": SLOW}


@pytest.mark.parametrize(("changes", "words"), [
    ({"policy": "magic"}, ["'magic'", "shared, chunked, disaggregated, auto"]),
    ({"requests": []}, ["empty", "at least 1 request"]),
    ({"requests": [Request("r", -1.0, 5, 5)]}, ["'r'", "arrival_s is -1", "from 0"]),
    ({"requests": [Request("r", float("nan"), 5, 5)]}, ["'r'", "arrival_s is nan"]),
    ({"requests": [Request("r", 0.0, 0, 5)]}, ["'r'", "num_prompt_tokens is 0", "at least 1"]),
    ({"requests": [Request("r", 0.0, 5, 0)]}, ["'r'", "num_output_tokens is 0", "at least 1"]),
    ({"requests": [Request("r", 0.0, 5, 5)] * 2}, ["'r'", "more than once"]),
    ({"pools": Pools(num_prompt=0)}, ["num_prompt is 0", "at least 1"]),
    ({"pools": Pools(num_completion=-1)}, ["num_completion is -1", "at least 1"]),
    ({"policy": "shared", "pools": Pools(num_normal=0)}, ["num_normal is 0", "at least 1"]),
    ({"policy": "chunked", "chunk": 0}, ["chunk is 0", "at least 1"]),
    ({"cost": CostModel(prefill_overhead_s=-1e-3)}, ["prefill_overhead_s is -0.001", "from 0"]),
    ({"cost": CostModel(decode=DecodeCost(float("nan")))}, ["decode.base_s is nan", "from 0"]),
    ({"cost": CostModel(transfer_bytes_per_s=0.0)}, ["transfer_bytes_per_s is 0", "above 0"]),
    ({"cost": CostModel(completion=Capacity(max_num_seqs=0))}, ["completion.max_num_seqs is 0", "from 1"]),
])  # fmt: skip
def test_wrong_input_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        simulate(**{**GOOD, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_sending_the_kv_makes_prefills_longer_on_prompt_workers_only() -> None:
    """A pass that sends takes 1.5 times as long; one pool prefills where it decodes, and sends nothing."""
    requests = [Request("a", 0.0, 100, 2)]
    bare = CostModel(prefill_per_token_s=0.01, decode=DecodeCost(0.1))
    sending = replace(bare, prefill_sending=1.5)
    for policy, factor in (("disaggregated", 1.5), ("shared", 1.0)):
        before, after = (simulate(policy, requests, cost).outcomes[0].ttft_s for cost in (bare, sending))
        assert before == pytest.approx(1.0), policy
        assert after == pytest.approx(factor), policy
