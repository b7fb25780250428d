"""Summaries against naive computations: gaps written out, sorted, and counted by the definition of a nearest rank."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from twinpool.cluster.metrics import inter_token_latencies_s, time_per_output_token_s
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.result import Outcome, Run
from twinpool.cluster.sizing.summary import (
    Distribution,
    Slo,
    distribution,
    nearest_rank,
    summarize,
    ttft_stages_s,
    weighted_distribution,
)
from twinpool.cluster.sizing.workload import Request

TICK_S = 1 / 64  # sums of these are exact
ticks = st.integers(0, 640).map(lambda n: n * TICK_S)


@dataclass(frozen=True)
class Life:
    """What happened to one request, token by token."""

    arrival_s: float
    times_s: tuple[float, ...]
    is_finished: bool
    refused: str | None = None

    def outcome(self, name: str) -> Outcome:
        request = Request(name, self.arrival_s, 10, max(1, len(self.times_s)))
        outcome = Outcome(request, num_tokens=len(self.times_s), is_finished=self.is_finished, refused=self.refused)
        if self.times_s:
            outcome.first_token_s, outcome.last_token_s = self.times_s[0], self.times_s[-1]
            outcome.max_gap_s = max(inter_token_latencies_s(self.times_s), default=0.0)
        return outcome


@st.composite
def lives(draw: st.DrawFn) -> Life:
    arrival_s = draw(ticks)
    if draw(st.integers(0, 5)) == 0:
        return Life(arrival_s, (), False, "no room")
    gaps = draw(st.lists(ticks, max_size=6))
    times: list[float] = []
    for gap_s in gaps:
        times.append((times[-1] if times else arrival_s) + gap_s)
    return Life(arrival_s, tuple(times), bool(times) and draw(st.booleans()))


def _run(all_lives: Sequence[Life], num_workers: int = 2) -> Run:
    outcomes = [life.outcome(f"r{i}") for i, life in enumerate(all_lives)]
    gaps = Counter(gap_s for life in all_lives for gap_s in inter_token_latencies_s(life.times_s))
    end_s = max((time_s for life in all_lives for time_s in (life.arrival_s, *life.times_s)), default=0.0)
    return Run("shared", outcomes, dict(gaps), num_workers, end_s, busy_s={"normal-0": 1.5, "normal-1": 2.0})


def _naive_rank(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least so many percent of all values do not exceed."""
    reached = [v for v in values if 100 * sum(other <= v for other in values) >= percent * len(values)]
    return min(reached)


def _naive(values: Sequence[float]) -> Distribution:
    if not values:
        return Distribution()
    p50, p90, p99 = (_naive_rank(values, percent) for percent in (50, 90, 99))
    return Distribution(len(values), fsum(values) / len(values), p50, p90, p99, max(values))


def _misses_any(life: Life, slo: Slo, itl_p99_s: float | None) -> bool:
    if life.refused is not None or not life.is_finished:
        return True
    actual = {
        "ttft_s": life.times_s[0] - life.arrival_s,
        "tpot_s": time_per_output_token_s(life.times_s) or 0.0,
        "itl_p99_s": itl_p99_s or 0.0,
        "max_gap_s": max(inter_token_latencies_s(life.times_s), default=0.0),
    }
    return any(actual[key] > limit for key, limit in slo.limits().items())


limits = st.none() | st.integers(1, 640).map(lambda n: n * TICK_S)
slos = st.builds(Slo, limits, limits, limits, limits, st.floats(0.01, 1))


@given(st.lists(ticks, max_size=300))
def test_distributions_are_those_of_the_definition(values: list[float]) -> None:
    assert distribution(values) == _naive(values)
    assert distribution([None, *values, None]) == _naive(values)
    assert weighted_distribution({**Counter(values), 77.0: 0}) == _naive(values)


def test_a_nearest_rank_is_a_value_that_occurred() -> None:
    """With three values the 99th percentile is the largest; interpolation would give less."""
    assert nearest_rank([0.1, 0.2, 0.534], 99) == 0.534
    assert nearest_rank([1, 2, 3, 4], 50) == 2
    assert nearest_rank(range(1, 101), 99) == 99
    assert nearest_rank([5], 0) == 5


@given(st.lists(lives(), max_size=12), slos, ticks)
@settings(max_examples=200)
def test_a_summary_is_what_counting_gives(all_lives: list[Life], slo: Slo, warmup_s: float) -> None:
    run = _run(all_lives)
    counted = [life for life in all_lives if life.arrival_s >= warmup_s]
    found = summarize(run, slo, warmup_s)
    finished = [life for life in counted if life.is_finished]
    tpots = [time_per_output_token_s(life.times_s) for life in counted]
    gaps = [gap_s for life in all_lives for gap_s in inter_token_latencies_s(life.times_s)]
    assert found.ttft_s == _naive([life.times_s[0] - life.arrival_s for life in counted if life.times_s])
    assert found.tpot_s == _naive([tpot_s for tpot_s in tpots if tpot_s is not None])
    assert found.e2e_s == _naive([life.times_s[-1] - life.arrival_s for life in finished])
    assert found.itl_s == _naive(gaps)
    assert found.max_gap_s == max((g for life in counted for g in inter_token_latencies_s(life.times_s)), default=None)
    assert (found.num_arrived, found.num_finished) == (len(counted), len(finished))
    assert found.num_refused == sum(life.refused is not None for life in counted)
    attaining = sum(not _misses_any(life, slo, _naive(gaps).p99) for life in counted)
    assert found.slo_attainment == (attaining / len(counted) if counted else None)
    assert found.is_slo_met == (attaining / len(counted) >= slo.attainment if counted else None)
    assert (found.binding_limit is None) == (attaining == len(counted))


@given(st.lists(lives(), max_size=12), slos)
def test_every_request_that_missed_is_counted_under_what_it_missed(all_lives: list[Life], slo: Slo) -> None:
    found = summarize(_run(all_lives), slo)
    assert list(found.missed) == [*slo.limits(), "refused", "unfinished"]
    for key, limit in slo.limits().items():
        alone = summarize(_run(all_lives), Slo(**{key: limit}))
        assert found.missed[key] == alone.missed[key]
    assert found.missed["refused"] == found.num_refused
    assert found.missed["unfinished"] == len(all_lives) - found.num_finished - found.num_refused
    if found.binding_limit is not None:
        assert found.missed[found.binding_limit] == max(found.missed.values())


@given(st.lists(lives(), max_size=12), slos, st.sampled_from(["ttft_s", "tpot_s", "itl_p99_s", "max_gap_s"]))
def test_a_tighter_limit_never_raises_attainment(all_lives: list[Life], slo: Slo, key: str) -> None:
    limit = slo.limits().get(key)
    tighter = Slo(**{**slo.limits(), key: (limit or 10.0) / 2})
    loose, tight = summarize(_run(all_lives), slo), summarize(_run(all_lives), tighter)
    assert (tight.slo_attainment or 0.0) <= (loose.slo_attainment or 0.0)


def _steady(num: int, every_s: float, num_tokens: int = 3) -> list[Life]:
    gap_s = 2 * TICK_S
    return [
        Life(i * every_s, tuple(i * every_s + 1.0 + k * gap_s for k in range(num_tokens)), True) for i in range(num)
    ]


def test_goodput_is_the_arrivals_rate_when_all_attain() -> None:
    """64 requests, one every 50 ms, are 20 a second, whatever the run's end."""
    found = summarize(_run(_steady(64, 0.05)), Slo(ttft_s=1.5))
    assert found.goodput_per_s == pytest.approx(20)
    assert found.goodput_per_worker_per_s == pytest.approx(10)
    late = [*_steady(48, 0.05), *(Life(2.4 + i * 0.05, (9.0,), True) for i in range(16))]
    assert summarize(_run(late), Slo(ttft_s=1.5)).goodput_per_s == pytest.approx(15)


def test_throughput_counts_what_was_sent_until_the_end() -> None:
    found = summarize(_run([*_steady(4, 1.0), Life(0.0, (8.0, 10.0), False), Life(1.0, (), False, "no room")]))
    assert found.requests_per_s == pytest.approx(4 / 10)
    assert found.output_tokens_per_s == pytest.approx((4 * 3 + 2) / 10)
    assert (found.gpu_s, found.worker_s) == (3.5, 20.0)
    assert (found.slo_attainment, found.goodput_per_s, found.is_slo_met, found.binding_limit) == (None,) * 4


def test_the_refused_and_the_unfinished_have_missed() -> None:
    """Six of ten finish in time; that the others have no TTFT must not flatter the share."""
    all_lives = [*_steady(6, 1.0), *[Life(6.0, (), False, "no room")] * 3, Life(7.0, (), False)]
    found = summarize(_run(all_lives), Slo(ttft_s=1.0))
    assert found.slo_attainment == 0.6
    assert found.missed == {"ttft_s": 1, "refused": 3, "unfinished": 1}
    assert found.binding_limit == "refused"


def test_a_mean_hides_a_stall_that_the_largest_gap_shows() -> None:
    """95 gaps of 38 ms, one of which became 524 ms: TPOT 43 ms, and users saw half a second of nothing."""
    times = [0.1]
    for i in range(95):
        times.append(times[-1] + (0.524 if i == 40 else 0.038))
    run = _run([Life(0.0, tuple(times), True)])
    assert summarize(run, Slo(tpot_s=0.05)).slo_attainment == 1
    assert summarize(run, Slo(tpot_s=0.05, max_gap_s=0.1)).slo_attainment == 0
    assert summarize(run, Slo(tpot_s=0.05, max_gap_s=0.1)).binding_limit == "max_gap_s"
    assert summarize(run, Slo(itl_p99_s=0.05)).slo_attainment == 0


def test_one_token_has_no_tpot_and_meets_its_limit() -> None:
    found = summarize(_run([Life(0.0, (0.5,), True)]), Slo(tpot_s=0.001, max_gap_s=0.001, itl_p99_s=0.001))
    assert (found.slo_attainment, found.tpot_s.num, found.max_gap_s) == (1, 0, None)


def test_the_run_s_gaps_judge_every_request() -> None:
    slow = Life(9.0, (9.5, 12.5), True)
    assert summarize(_run([*_steady(10, 0.5), slow]), Slo(itl_p99_s=1.0)).missed["itl_p99_s"] == 11
    assert summarize(_run([*_steady(60, 0.125), slow]), Slo(itl_p99_s=1.0)).missed["itl_p99_s"] == 0


def _staged(start: float, end: float, kv: float | None, first: float) -> Outcome:
    return Outcome(Request("r", 1.0, 9, 9), start, end, kv, first, first, num_tokens=1, is_finished=True)


@pytest.mark.parametrize(
    ("outcome", "stages"),
    [
        (_staged(1.5, 2.0, None, 2.0), (0.5, 0.5, 0, 0)),  # sent at the prefill's end
        (_staged(1.5, 2.0, 3.0, 2.125), (0.5, 0.5, 0, 0.125)),  # … while the KV was still on its way
        (_staged(1.5, 2.0, 2.25, 3.0), (0.5, 0.5, 0.25, 0.75)),  # sent by the decode side
        (_staged(1.5, 2.0, 1.75, 3.0), (0.5, 0.5, 0, 1.0)),  # … which had the KV before the prefill ended
    ],
)
def test_the_stages_say_what_the_first_token_waited_for(outcome: Outcome, stages: tuple[float, ...]) -> None:
    assert ttft_stages_s(outcome) == stages


@given(st.lists(ticks, min_size=4, max_size=4), st.none() | ticks)
def test_the_stages_add_up_to_the_ttft(steps: list[float], kv_s: float | None) -> None:
    arrival_s, start_s, end_s, first_s = (sum(steps[: i + 1]) for i in range(4))
    outcome = Outcome(Request("r", arrival_s, 9, 9), start_s, end_s, kv_s, first_s, first_s)
    stages = ttft_stages_s(outcome)
    assert stages is not None
    assert sum(stages) == outcome.ttft_s
    assert min(stages) >= 0


def test_stages_are_summed_up_for_the_requests_that_have_them() -> None:
    outcomes = [_staged(1.5, 2.0, 2.25, 3.0), _staged(2.0, 2.0, 2.0, 2.0), Life(0.0, (), False).outcome("x")]
    outcomes[0].num_preemptions = 3
    found = summarize(Run("disaggregated", outcomes, {}, 2, 4.0))
    assert (found.queue_s.num, found.queue_s.mean, found.queue_s.max) == (2, 0.75, 1.0)
    assert (found.prefill_s.max, found.transfer_s.max, found.decode_wait_s.max) == (0.5, 0.25, 0.75)
    assert found.num_preemptions == 3


def _keys(value: Any) -> Any:
    return [(key, _keys(part)) for key, part in value.items()] if isinstance(value, dict) else None


def test_json_has_the_same_keys_for_every_run() -> None:
    slo = Slo(ttft_s=1.0)
    full, empty = summarize(_run(_steady(5, 1.0)), slo).to_json(), summarize(_run([]), slo).to_json()
    assert _keys(full) == _keys(empty)
    assert json.loads(json.dumps(full, allow_nan=False)) == full
    assert full["ttft_s"]["p99"] == 1.0
    assert (empty["ttft_s"]["p99"], empty["goodput_per_s"], empty["is_slo_met"]) == (None, None, None)
    assert full["slo"] == {
        "ttft_s": 1.0, "tpot_s": None, "itl_p99_s": None, "max_gap_s": None, "attainment": 0.9,
    }  # fmt: skip


@pytest.mark.parametrize("key", ["ttft_s", "tpot_s", "itl_p99_s", "max_gap_s", "attainment"])
def test_an_impossible_slo_is_refused_by_its_key(key: str) -> None:
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"{key} is {value}"):
            Slo(**{key: value})
    with pytest.raises(ConfigError, match=r"attainment is 1\.5"):
        Slo(attainment=1.5)


@pytest.mark.parametrize("warmup_s", [-1.0, float("nan"), float("inf")])
def test_an_impossible_warm_up_is_refused(warmup_s: float) -> None:
    with pytest.raises(ConfigError, match="warmup_s"):
        summarize(_run([]), warmup_s=warmup_s)
