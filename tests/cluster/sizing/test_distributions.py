"""Generated workloads: what was asked for is what arrives. Tolerances are four standard errors of the estimate."""

import os
import subprocess
import sys
from itertools import pairwise
from math import exp, log, log1p, sqrt
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean, stdev

import pytest
from hypothesis import given, settings, strategies as st
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.distributions import (
    ConstantLengths,
    EmpiricalLengths,
    Lengths,
    LognormalLengths,
    UniformLengths,
    Workload,
    describe,
    generate,
    parse_lengths,
)
from twinpool.cluster.sizing.traces import read_trace, write_trace
from twinpool.cluster.sizing.workload import Request

N = 20_000
ONE = ConstantLengths(1)


def _draws(lengths: Lengths, n: int = N) -> list[int]:
    random = Random(1)
    return [lengths.draw(random) for _ in range(n)]


def _gaps(spec: Workload) -> list[float]:
    return [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(generate(spec))]


@pytest.mark.parametrize("burstiness", [0.002, 0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """The gamma distribution's kurtosis is 3 + 6 CV², from which the error of a measured CV follows."""
    gaps = _gaps(Workload(4.0, ONE, ONE, burstiness, num_requests=N))
    assert fmean(gaps) == pytest.approx(0.25, rel=4 * burstiness / sqrt(N))
    cv_error = sqrt((2 + 6 * burstiness**2) / N) / 2 + burstiness / sqrt(N)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(burstiness, rel=4 * cv_error)


def test_burstiness_one_is_poisson() -> None:
    """Gaps are exponential: a share of exp(-k) is longer than k means."""
    gaps = _gaps(Workload(2.0, ONE, ONE, num_requests=N))
    for k in (0.1, 0.5, 1.0, 2.0, 4.0):
        share = exp(-k)
        longer = sum(gap > k / 2 for gap in gaps) / len(gaps)
        assert longer == pytest.approx(share, abs=4 * sqrt(share * (1 - share) / N))


@pytest.mark.parametrize("burstiness", [0.0, 1e-300, 1e-8])
def test_burstiness_zero_is_a_metronome(burstiness: float) -> None:
    """A burstiness that no run can show hung the gamma generator."""
    requests = generate(Workload(20.0, ONE, ONE, burstiness, num_requests=64))
    assert [request.arrival_s for request in requests] == [round(i * 0.05, 9) for i in range(64)]


def test_lengths_have_the_mean_and_the_width() -> None:
    assert set(_draws(ConstantLengths(7), 10)) == {7}
    uniform = _draws(UniformLengths(200, 203))
    assert all(uniform.count(n) / N == pytest.approx(0.25, abs=4 * sqrt(0.1875 / N)) for n in (200, 201, 202, 203))
    observed = _draws(EmpiricalLengths((5, 5, 5, 900)))
    assert observed.count(5) + observed.count(900) == N
    assert observed.count(5) / N == pytest.approx(0.75, abs=4 * sqrt(0.1875 / N))


@pytest.mark.parametrize("cv", [0.1, 0.8, 1.5])
def test_lognormal_lengths_have_the_mean_and_the_cv(cv: float) -> None:
    """The logarithm is normal, and its deviation follows from the CV."""
    draws = _draws(LognormalLengths(1000, cv))
    sigma = sqrt(log1p(cv**2))
    assert fmean(draws) == pytest.approx(1000, rel=4 * cv / sqrt(N))
    assert stdev(map(log, draws)) == pytest.approx(sigma, rel=4 / sqrt(2 * N))


@pytest.mark.parametrize("p99", [1000, 2500, 14_900])
def test_lognormal_lengths_have_the_mean_and_the_99th_percentile(p99: int) -> None:
    lengths = LognormalLengths.from_p99(1000, p99)
    sigma = sqrt(log1p(lengths.cv**2))
    assert 1000 * exp(NormalDist().inv_cdf(0.99) * sigma - sigma**2 / 2) == pytest.approx(p99)
    below = sum(draw <= p99 for draw in _draws(lengths)) / N
    assert below == pytest.approx(0.99, abs=4 * sqrt(0.0099 / N)) or p99 == 1000 == max(_draws(lengths))


@given(st.integers(), st.floats(0, 5), st.sampled_from([0.5, 2.0, 8.0]))
@settings(max_examples=30, deadline=None)
def test_another_rate_gives_the_same_requests_closer_together(seed: int, burstiness: float, factor: float) -> None:
    lengths = LognormalLengths(50, 2)
    slow = generate(Workload(3.0, lengths, lengths, burstiness, num_requests=30, seed=seed))
    fast = generate(Workload(3.0 * factor, lengths, lengths, burstiness, num_requests=30, seed=seed))
    assert [r.num_prompt_tokens for r in slow] == [r.num_prompt_tokens for r in fast]
    assert [r.num_output_tokens for r in slow] == [r.num_output_tokens for r in fast]
    expected = [request.arrival_s / factor for request in slow]
    assert [r.arrival_s for r in fast] == pytest.approx(expected, rel=1e-9, abs=2e-9)
    assert min(r.num_prompt_tokens for r in slow) >= 1
    assert slow[0].arrival_s == 0
    assert slow == sorted(slow, key=lambda request: request.arrival_s)


def test_one_distribution_changes_nothing_else() -> None:
    before = generate(Workload(1.0, LognormalLengths(100, 1), UniformLengths(1, 99), num_requests=50))
    after = generate(Workload(1.0, ConstantLengths(5), UniformLengths(1, 99), num_requests=50))
    assert [(r.arrival_s, r.num_output_tokens) for r in before] == [(r.arrival_s, r.num_output_tokens) for r in after]


def test_a_duration_ends_the_workload() -> None:
    whole = generate(Workload(10.0, ONE, ONE, num_requests=500, seed=3))
    part = generate(Workload(10.0, ONE, ONE, duration_s=20.0, seed=3))
    assert part == [request for request in whole if request.arrival_s < 20.0]
    assert len(part) == pytest.approx(200, abs=4 * sqrt(200))


def test_a_seed_means_the_same_in_every_process() -> None:
    spec = "Workload(5.0, UniformLengths(1, 9), LognormalLengths(80, 0.8), 2.0, num_requests=40, seed=7)"
    program = f"from twinpool.cluster.sizing.distributions import *\nprint(generate({spec}))"
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    other = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    here = generate(Workload(5.0, UniformLengths(1, 9), LognormalLengths(80, 0.8), 2.0, num_requests=40, seed=7))
    assert other.stdout.strip() == str(here)
    assert here != generate(
        Workload(5.0, UniformLengths(1, 9), LognormalLengths(80, 0.8), 2.0, num_requests=40, seed=8)
    )


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1000", ConstantLengths(1000)),
        ("200-800", UniformLengths(200, 800)),
        ("lognormal:1000,0.8", LognormalLengths(1000, 0.8)),
        (" lognormal:1000, p99=4000", LognormalLengths.from_p99(1000, 4000)),
    ],
)
def test_lengths_are_read_from_text(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text) == lengths


def test_lengths_are_taken_from_a_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [Request("a", 0.0, 5, 50), Request("b", 1.0, 6, 60)])
    assert parse_lengths(f"trace:{tmp_path / 't'}", "prompt") == EmpiricalLengths((5, 6))
    assert parse_lengths(f"trace:{tmp_path / 't'}", "output") == EmpiricalLengths((50, 60))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "means nothing"),
        ("many", "means nothing"),
        ("-5", "means nothing"),
        ("normal:1,2", "means nothing"),
        ("lognormal:1000", "means nothing"),
        ("0", "num_tokens is 0"),
        ("800-200", "max_tokens is 200"),
        ("0-7", "min_tokens is 0"),
        ("lognormal:0.5,1", "mean_tokens is 0.5"),
        ("lognormal:inf,1", "mean_tokens is inf"),
        ("lognormal:9,-1", "cv is -1"),
        ("lognormal:9,nan", "cv is nan"),
        ("lognormal:1000,p99=900", "p99_tokens is 900.0, must be 1000 to 149"),
        ("lognormal:1000,p99=15000", "p99_tokens is 15000"),
        ("trace:/no/such/file", "cannot read the trace /no/such/file"),
    ],
)
def test_lengths_that_mean_nothing_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_lengths(text, "output")
    assert told in str(refusal.value)
    assert f"output lengths {text!r}" in str(refusal.value) or f"output lengths are {text!r}" in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("rate_per_s", [0.0, -1.0, float("nan"), float("inf")]),
        ("burstiness", [-0.1, 101.0, float("nan")]),
        ("num_requests", [0, -1, 10**8]),
        ("duration_s", [0.0, -1.0, 1e9, float("nan")]),
    ],
)
def test_an_impossible_workload_is_refused_by_its_key(key: str, values: list[float]) -> None:
    for value in values:
        settings_ = {"rate_per_s": 1.0, key: value}
        if key != "duration_s":
            settings_.setdefault("num_requests", 5)
        with pytest.raises(ConfigError, match=f"{key} is "):
            Workload(prompt=ONE, output=ONE, **settings_)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="exactly one"):
        Workload(1.0, ONE, ONE)
    with pytest.raises(ConfigError, match="exactly one"):
        Workload(1.0, ONE, ONE, num_requests=1, duration_s=1.0)
    with pytest.raises(ConfigError, match="observed is empty"):
        EmpiricalLengths(())
    with pytest.raises(ConfigError, match="observed is 0"):
        EmpiricalLengths((3, 0))


def test_a_workload_is_described_by_hand() -> None:
    """Gaps 1 and 3: mean 2, deviation 1."""
    requests = [Request("c", 14.0, 30, 1), Request("a", 10.0, 10, 1), Request("b", 11.0, 20, 4)]
    found = describe(requests)
    assert (found.num_requests, found.duration_s, found.rate_per_s, found.burstiness) == (3, 4.0, 0.5, 0.5)
    assert (found.prompt.mean, found.prompt.p50, found.prompt.p99, found.prompt.max) == (20, 20, 30, 30)
    assert (found.output.mean, found.output.p50, found.output.max) == (2, 1, 4)


def test_what_has_no_rate_is_described_without() -> None:
    for requests in ([Request("a", 1.0, 2, 3)], [Request("a", 1.0, 2, 3), Request("b", 1.0, 2, 3)]):
        assert (describe(requests).rate_per_s, describe(requests).burstiness) == (None, None)
    with pytest.raises(ConfigError, match="no requests"):
        describe([])


PUBLISHED = {  # file → requests, seconds, burstiness, prompt mean and p50 and p99 and max, output mean
    "azure_2023_code.csv": (8819, 3436, 13, 2048, 1469, None, 7437, 27.9),
    "azure_2023_conv.csv": (19366, 3502, 1.1, 1155, None, 4142, None, 211),
    "mooncake_conversation.jsonl": (12031, 3537, 3.0, 12035, 6909, 85401, None, 343),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_traces_have_their_known_statistics(name: str) -> None:
    path = Path(os.environ.get("TWINPOOL_DATA", Path(__file__).parents[4] / "shared" / "data")) / name
    if not path.exists():
        pytest.skip(f"no {path}; TWINPOOL_DATA names the folder of the public traces")
    found = describe(read_trace(path))
    num_requests, duration_s, burstiness, mean, p50, p99, most, output_mean = PUBLISHED[name]
    assert found.num_requests == num_requests
    assert found.duration_s == pytest.approx(duration_s, abs=0.5)
    assert found.burstiness == pytest.approx(burstiness, rel=0.02)
    assert found.prompt.mean == pytest.approx(mean, abs=0.5)
    assert found.output.mean == pytest.approx(output_mean, abs=0.5)
    exact = ((p50, found.prompt.p50), (p99, found.prompt.p99), (most, found.prompt.max))
    assert [(known, value) for known, value in exact if known not in (None, value)] == []
