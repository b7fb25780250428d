"""What a worker runs when it is asked how long its passes take: the same pass each time, and every block home."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, strategies as st
from twinpool.cluster.protocol.messages import Failed, PassesTimed, SampledToken, TimePasses
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.probe import PassProbe
from twinpool.engine.sequence import ScheduledRow

TOKEN = SampledToken(token=1)


@dataclass(frozen=True)
class Limits:
    block_size: int = 4
    max_model_len: int = 60
    max_num_batched_tokens: int = 32
    max_num_seqs: int = 6


def order(*rows: tuple[int, int], **changes: Any) -> TimePasses:
    fields: dict[str, Any] = {"probe_id": "p", "num_warmup": 1, "num_repeats": 3, "limit_s": 10.0}
    return TimePasses(rows=rows, **(fields | changes))


def new_probe(num_blocks: int = 20) -> tuple[PassProbe, BlockPool]:
    pool = BlockPool(num_blocks)
    return PassProbe(pool, Limits()), pool


def run(probe: PassProbe, ends_s: list[float]) -> tuple[list[list[ScheduledRow]], list[PassesTimed]]:
    """Run passes that end at these times; return the rows of each and the answers."""
    passes: list[list[ScheduledRow]] = []
    answers: list[PassesTimed] = []
    for end_s in ends_s:
        passes.append(probe.schedule())
        answers += probe.completed(passes[-1], [TOKEN] * len(passes[-1]), end_s)
    return passes, answers


def test_a_pass_lasts_from_the_end_of_the_one_before_and_warm_up_does_not_count() -> None:
    probe, pool = new_probe()
    assert probe.begin(order((0, 8)), True, 1.0) == []
    probe.written(2.0)
    _, answers = run(probe, [9.0, 9.5, 10.5, 10.75])
    assert answers == [PassesTimed(probe_id="p", pass_s=(0.5, 1.0, 0.25))]
    assert not probe.is_active
    assert pool.num_free == pool.num_blocks


def test_a_fused_pass_runs_the_same_rows_each_time() -> None:
    """Prompts first, then decode rows; every row samples; nothing advances."""
    probe, pool = new_probe()
    probe.begin(order((7, 1), (0, 5), (9, 3), (0, 1)), True, 0.0)
    assert [(s.key, n) for s, n in probe.unwritten()] == [(("p", 0), 7), (("p", 1), 0), (("p", 2), 9), (("p", 3), 0)]
    probe.written(0.0)
    assert probe.unwritten() == []
    passes, _ = run(probe, [1.0, 2.0])
    spans = [[(row.sequence.key[1], row.start, row.end, row.samples) for row in rows] for rows in passes]
    assert sorted(spans[0]) == [(0, 7, 8, True), (1, 0, 5, True), (2, 9, 12, True), (3, 0, 1, True)]
    assert spans[0][-1][0] == 0, "decode rows come last"
    assert spans[0] == spans[1]
    assert pool.num_used("sequence") == 2 + 2 + 3 + 1


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        ([(0, 1)] * 7, "7 rows; max_num_seqs is 6"),
        ([(0, 20), (0, 13)], "33 new tokens in a pass; max_num_batched_tokens is 32"),
        ([(60, 1)], "a row of 61 tokens; max_model_len is 60"),
        ([(40, 1), (36, 1)], "the rows take 21 KV blocks; the worker has 20"),
    ],
)
def test_what_does_not_fit_is_refused_for_good(rows: list[tuple[int, int]], numbers: str) -> None:
    probe, pool = new_probe()
    assert probe.begin(order(*rows), True, 0.0) == [
        Failed(request_id="p", attempt=0, reason=numbers, is_retryable=False)
    ]
    assert not probe.is_active
    assert pool.num_free == pool.num_blocks


def test_a_worker_that_is_not_idle_refuses_for_now() -> None:
    probe, _ = new_probe()
    (failed,) = probe.begin(order((0, 1)), False, 0.0)
    assert failed.is_retryable
    probe.begin(order((0, 1), probe_id="q"), True, 0.0)
    (second,) = probe.begin(order((0, 1), probe_id="r"), True, 0.0)
    assert second.is_retryable, "one probe at a time"
    assert second.request_id == "r"
    assert probe.is_active


def test_an_order_that_is_delivered_twice_runs_once() -> None:
    probe, _ = new_probe()
    probe.begin(order((0, 1), num_warmup=0, num_repeats=1), True, 0.0)
    assert probe.begin(order((0, 1)), True, 0.1) == []
    probe.written(0.2)
    assert len(run(probe, [1.0])[1]) == 1
    assert probe.begin(order((0, 1)), True, 2.0) == []
    assert not probe.is_active


def test_it_gives_up_when_other_work_comes_or_its_time_is_up() -> None:
    for is_idle, now, is_retryable, reason in (
        (False, 1.0, True, "other work came"),
        (True, 10.0, False, "0 of 4 passes"),
    ):
        probe, pool = new_probe()
        probe.begin(order((0, 1)), True, 0.0)
        assert probe.tick(True, 9.9) == []
        (failed,) = probe.tick(is_idle, now)
        assert failed.is_retryable == is_retryable
        assert reason in failed.reason
        assert probe.tick(is_idle, 99.0) == [], "it says so once"
        assert pool.num_free == pool.num_blocks


def test_only_the_probe_that_is_named_stops() -> None:
    probe, pool = new_probe()
    probe.begin(order((0, 1)), True, 0.0)
    probe.stop("another")
    assert probe.is_active
    probe.stop("p")
    probe.stop("p")
    assert not probe.is_active
    assert pool.num_free == pool.num_blocks


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=8))
def test_whatever_is_asked_is_refused_or_run_as_asked(rows: list[tuple[int, int]]) -> None:
    """I1 after every step; an accepted pass runs exactly the rows of the question."""
    probe, pool = new_probe(num_blocks=30)
    failed = probe.begin(order(*rows, num_warmup=0, num_repeats=2), True, 0.0)
    pool.check()
    assert bool(failed) != probe.is_active
    if probe.is_active:
        probe.written(0.0)
        passes, answers = run(probe, [1.0, 2.0])
        for scheduled in passes:
            assert sorted((row.start, row.end - row.start) for row in scheduled) == sorted(rows)
        assert answers[0].pass_s == (1.0, 1.0)
    pool.check()
    assert pool.num_free == pool.num_blocks
