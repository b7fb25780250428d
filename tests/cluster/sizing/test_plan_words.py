"""A plan in words: what to build, what of it can be started today, and figures that can be read."""

import pytest
from cost_profiles import cost_profile
from twinpool.cluster.sizing.distributions import ConstantLengths, LognormalLengths, Workload, generate
from twinpool.cluster.sizing.plan import Effort, plan
from twinpool.cluster.sizing.plan_words import format_ms, verdict
from twinpool.cluster.sizing.summary import Slo
from twinpool.cluster.sizing.trials import Limits
from twinpool.cluster.sizing.workload import Request

PROFILE = cost_profile(prefill_per_token_s=1e-4, decode_per_sequence_s=1e-3)
SLO = Slo(ttft_s=0.4, tpot_s=0.025)
QUICK = Effort(num_draws=0)
PAIRS = Limits(policies=("disaggregated",))


def workload() -> list[Request]:
    lengths = LognormalLengths(800, 0.6), ConstantLengths(60)
    return generate(Workload(12.0, *lengths, num_requests=40, seed=3))


def test_what_can_be_started_today_is_said_beside_what_cannot() -> None:
    found = plan(workload(), PROFILE, SLO, Limits(normal_cost=0.1), effort=Effort(num_draws=1))
    assert found.startable is not None
    words = " ".join(map(str, verdict(found)))
    assert "cannot start NORMAL workers yet" in words
    assert found.startable.candidate.label in words
    assert found.startable.stability is not None
    alone = plan(workload(), PROFILE, SLO, Limits(policies=("chunked",)), effort=QUICK)
    assert "Two pools were not tried" in str(verdict(alone)[-1])
    pairs = plan(workload(), PROFILE, SLO, PAIRS, effort=QUICK)
    assert "cannot start" not in " ".join(map(str, verdict(pairs)))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"),
        (1.4632, "1,463"),
        (0.5771, "577"),
        (0.09996, "100"),
        (0.0583, "58.3"),
        (0.0099962, "10.0"),
        (2e-4, "0.20"),
    ],
)
def test_milliseconds_have_three_digits_and_no_exponent(seconds: float | None, words: str) -> None:
    assert format_ms(seconds) == words
