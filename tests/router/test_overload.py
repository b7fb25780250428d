"""When there is too much to do, or too little time: who is refused, who is never begun, who comes next."""

import random

import pytest
from timed_pools import TimedPools
from twinpool.router.admission import AdmissionLimits
from twinpool.router.generation import Caller, Finished, GenerationFailed
from twinpool.router.quotas import Quota

LOUD, QUIET = Caller("loud"), Caller("quiet")


def test_a_burst_of_eight_times_the_capacity_is_refused_at_once_and_then_all_is_well() -> None:
    """I1, I2: for 10 s 80 prompts come a second where 10 can be computed; the queue holds two seconds' worth."""
    pools = TimedPools(AdmissionLimits(max_queued_requests=20))
    for number in range(800):
        pools.at(number / 80, lambda n=number: pools.submit(f"r{n}"))
    pools.run(10.0)
    refused = [asked for asked in pools.asked.values() if asked.code == "queue_full"]
    assert len(refused) > 600
    assert all(asked.took_s == 0.0 for asked in refused), "nobody waits for a refusal"
    assert all(isinstance(a.end, GenerationFailed) and 1 <= (a.end.retry_after_s or 1) <= 5 for a in refused)
    pools.run(20.0)
    finished = [asked for asked in pools.asked.values() if isinstance(asked.end, Finished)]
    assert len(finished) + len(refused) == 800
    assert len(finished) >= 95, "and the worker was kept busy"
    pools.submit("afterwards")
    pools.run(21.0)
    assert pools.asked["afterwards"].took_s < 0.15


def test_nobody_is_accepted_to_wait_for_longer_than_is_allowed() -> None:
    """The prediction holds: in an overload without end those who are let in begin within about the limit."""
    pools = TimedPools(AdmissionLimits(max_queue_wait_s=2.0))
    for number in range(1500):
        pools.at(number / 50, lambda n=number: pools.submit(f"r{n}"))
    pools.run(40.0)
    begun = [asked for asked in pools.asked.values() if asked.begun_s is not None]
    waits_s = [a.begun_s - a.submitted_s for a in begun if a.begun_s and a.submitted_s > 4.0]
    assert max(waits_s) < 2.0 * 1.2, "once a rate is known"
    assert sum(isinstance(a.end, Finished) for a in pools.asked.values()) >= 290, "10 a second for 30 s"


def quiet_times_s(length: int, num_loud_per_s: int) -> list[float]:
    """Return how long each request of a quiet caller took, of about 50 at random times, beside a loud one's."""
    pools = TimedPools(AdmissionLimits(max_queue_wait_s=5.0))
    rng = random.Random(1)
    for number in range(60 * num_loud_per_s):
        pools.at(number / num_loud_per_s, lambda n=number: pools.submit(f"loud-{n}", LOUD))
    at_s = 5.0
    while at_s < 55.0:
        at_s += rng.expovariate(1.0)
        pools.at(at_s, lambda t=at_s: pools.submit(f"quiet-{t}", QUIET, length))
    pools.run(70.0)
    quiet = [asked for name, asked in pools.asked.items() if name.startswith("quiet")]
    assert all(isinstance(asked.end, Finished) for asked in quiet), "none of them is refused"
    return [asked.took_s for asked in quiet]


@pytest.mark.parametrize("length", [50, 200])
def test_a_quiet_caller_hardly_notices_a_loud_one(length: int) -> None:
    """At five times the capacity its requests take longer by the prompt that runs, even when a few come at once.

    The first ones wait for what was given ahead while nobody else had asked, two steps at most.
    """
    alone_s, beside_s = quiet_times_s(length, 0), quiet_times_s(length, 50)
    slower_s = [beside - alone for beside, alone in zip(beside_s, alone_s, strict=True)]
    assert slower_s[0] < 2 * 2.048 + 0.2
    assert max(slower_s[8:]) < 0.1 + 0.05


def test_a_worker_that_callers_share_is_kept_busy() -> None:
    """What is given ahead is little, and still enough: two callers get all that one would get."""
    pools = TimedPools(AdmissionLimits(max_queue_wait_s=2.0))
    for number in range(1000):
        caller = (LOUD, QUIET)[number % 2]
        pools.at(number / 50, lambda n=number, c=caller: pools.submit(f"r{n}", c, length=30 + n % 100))
    pools.run(20.0)
    computed_s = sum(30 + n % 100 for n in range(1000) if isinstance(pools.asked[f"r{n}"].end, Finished)) / 1000
    assert computed_s > 19.0, "of 20 s"


def test_a_loud_caller_alone_is_given_whole_steps() -> None:
    """With nobody to be fair to, as many prompts as a step holds go ahead, and may share steps."""
    pools = TimedPools()
    for number in range(100):
        pools.submit(f"r{number}")
    assert pools.dispatcher.num_queued == 100 - 41, "2 x 2,048 tokens"


def test_a_deadline_that_cannot_be_met_is_refused_and_one_that_can_is_met() -> None:
    pools = TimedPools()
    for number in range(200):
        pools.at(number / 20, lambda n=number: pools.submit(f"r{n}"))
    pools.run(10.0)  # 10 a second are computed: about ten seconds' worth waits
    assert pools.submit("hopeless", timeout_s=3.0).code == "queue_full"
    patient = pools.submit("patient", timeout_s=30.0)
    pools.run(40.0)
    assert isinstance(patient.end, Finished)


def test_who_would_wait_for_too_long_is_told_before_its_prompt_is_known() -> None:
    """A more urgent request of the same caller, and another caller's, are not."""
    pools = TimedPools(AdmissionLimits(max_queue_wait_s=2.0))
    for number in range(300):
        pools.at(number / 50, lambda n=number: pools.submit(f"r{n}", LOUD))
    pools.run(6.0)
    refusal = pools.dispatcher.refusal(LOUD, 0, pools.now)
    assert refusal is not None
    assert refusal.code == "queue_full"
    assert pools.dispatcher.refusal(LOUD, -1, pools.now) is None
    assert pools.dispatcher.refusal(QUIET, 0, pools.now) is None


def test_what_expires_in_the_queue_is_never_begun() -> None:
    """Accepted before any rate was known; the deadline is the request's own, and said in the message."""
    pools = TimedPools(seconds_per_token=0.01)
    for number in range(50):
        pools.submit(f"r{number}")
    late = pools.submit("late", timeout_s=0.5)
    pools.run(3.0)
    assert late.code == "timeout"
    assert "0.5 s" in str(late.end)
    assert (late.begun_s, late.ended_s) == (None, pytest.approx(0.5, abs=0.11))


def test_the_routers_own_limit_bounds_the_clients() -> None:
    pools = TimedPools(seconds_per_token=0.1)
    asked = pools.submit("r", length=1000, timeout_s=10_000.0)
    pools.run(100.0)
    assert (asked.code, asked.took_s) == ("timeout", pytest.approx(60.0, abs=0.11))


def test_cancelled_requests_take_nothing_with_them() -> None:
    """H4: forty leave, wherever they are, and the next four are served as if they had never been."""
    caller = Caller("k", quota=Quota(max_running_requests=60))
    pools = TimedPools(AdmissionLimits(max_queued_requests=64))
    for number in range(40):
        pools.submit(f"r{number}", caller)
    pools.run(0.25)
    for number in range(40):
        pools.cancel(f"r{number}")
    assert (pools.dispatcher.num_queued, pools.dispatcher.num_running, pools.dispatcher.num_queued_tokens) == (0, 0, 0)
    for number in range(40, 44):
        pools.submit(f"r{number}", caller)
    pools.run(10.0)
    assert all(isinstance(pools.asked[f"r{number}"].end, Finished) for number in range(40, 44))


def test_a_quota_is_told_with_the_time_until_there_is_more() -> None:
    caller = Caller("k", quota=Quota(max_running_requests=2, tokens_per_minute=6000))
    pools = TimedPools()
    assert [pools.submit(f"r{number}", caller, length=10).code for number in range(3)] == [None, None, "rate_limited"]
    assert pools.submit("another's", Caller("other")).code is None
    pools.run(5.0)
    large = pools.submit("large", caller, length=6000)
    pools.run(20.0)
    assert isinstance(large.end, Finished)
    exhausted = pools.submit("more", caller, length=3000)
    assert isinstance(exhausted.end, GenerationFailed)
    assert (exhausted.code, exhausted.end.retry_after_s) == ("rate_limited", pytest.approx(15.0, abs=0.5))
    assert pools.dispatcher.refusal(caller, 0, pools.now) is None, "a small one would be let in"


def test_where_nobody_serves_it_is_said_when_to_ask_again() -> None:
    asked = TimedPools(has_workers=False).submit("r")
    assert isinstance(asked.end, GenerationFailed)
    assert (asked.code, asked.end.retry_after_s) == ("no_worker", 10.0)


def test_whoever_lost_a_place_to_another_caller_is_told_once() -> None:
    pools = TimedPools(AdmissionLimits(max_queued_requests=4), seconds_per_token=1.0)
    for number in range(60):
        pools.submit(f"loud-{number}", LOUD)
    waiting = [name for name, asked in pools.asked.items() if asked.end is None]
    quiet = pools.submit("quiet", QUIET)
    assert quiet.code is None
    assert pools.asked[waiting[-1]].code == "queue_full", "the newest of the loud one"
    assert [name for name, asked in pools.asked.items() if asked.end is None] == [*waiting[:-1], "quiet"]
