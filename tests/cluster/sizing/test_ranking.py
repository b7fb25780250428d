"""What is recommended among equals, and how sure that is: noise is of the difference on the same requests."""

from dataclasses import replace

import pytest
from cost_profiles import cost_profile
from twinpool.cluster.sizing.ranking import Stability, recommend
from twinpool.cluster.sizing.result import Policy
from twinpool.cluster.sizing.summary import Slo
from twinpool.cluster.sizing.trials import Candidate, Limits, Trial, noise_between, run_trial
from twinpool.cluster.sizing.workload import Request

PROFILE = cost_profile(prefill_per_token_s=1e-4, decode_per_sequence_s=1e-3)
SLO = Slo(ttft_s=0.4, tpot_s=0.025)


def trial_of(policy: Policy, met: list[list[bool]], **sizes: int) -> Trial:
    """A trial of which only what each request met is told: by that many requests, each simulated alone."""
    requests = [[Request(f"{i}-{j}", 99.0 * j, 10, 2) for j in range(len(each))] for i, each in enumerate(met)]
    ran = run_trial(Candidate(policy, **sizes), requests, PROFILE.model(), SLO, Limits().rules)
    shares = [sum(each) / len(each) for each in met]
    summaries = [replace(s, slo_attainment=share) for s, share in zip(ran.summaries, shares, strict=True)]
    return replace(ran, summaries=tuple(summaries), met=tuple(map(tuple, met)))


def test_the_noise_of_a_difference_counts_requests_that_only_one_meets() -> None:
    """Two standard errors of the paired difference: with b and c such requests of n, sqrt(b + c - (b - c)^2/n)/n."""
    one = trial_of("chunked", [[True] * 60 + [False] * 40], num_normal=2)
    other = trial_of("disaggregated", [[True] * 50 + [False] * 10 + [True] * 6 + [False] * 34], num_prompt=1)
    assert noise_between(one, other) == pytest.approx(2 * (10 + 6 - 4**2 / 100) ** 0.5 / 100)
    assert noise_between(one, one) == 0.0


def test_what_differs_by_more_than_the_paired_noise_is_not_equal() -> None:
    """93 % of one draw in particular differ from 99.7 %, though each figure alone may be off by 8 % between draws."""
    bad = trial_of("chunked", [[True] * 99 + [False], [True] * 99 + [False], [True] * 82 + [False] * 18], num_normal=2)
    good = trial_of("disaggregated", [[True] * 99 + [False]] + [[True] * 100] * 2, num_prompt=1, num_completion=1)
    assert bad.noise > good.attainment - bad.attainment > noise_between(bad, good)
    chosen, reason = recommend([bad, good], Limits())
    assert chosen is good
    assert "within the noise" not in reason
    nearly = trial_of("chunked", [[True] * 99 + [False]] * 3, num_normal=2)
    chosen, reason = recommend([nearly, good], Limits())
    assert chosen is nearly
    assert "disaggregated costs the same and attains 99.7% against 99.0%, within the noise of 0.9%" in reason


def test_an_unstable_answer_says_that_it_sits_on_an_edge() -> None:
    assert "edge, so add a worker, or calibrate longer" in str(Stability(8, 3, 3, 0))
    assert "edge, so calibrate longer" in str(Stability(8, 2, 8, 6))
    assert "edge" not in str(Stability(8, 7, 7, 0))
