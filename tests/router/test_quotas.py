"""What one key may use: requests at a time, tokens a minute, and when there is more."""

import pytest
from twinpool.router.quotas import NO_QUOTA, Quota, Quotas

PER_MINUTE = Quota(tokens_per_minute=600)  # ten a second


def wait_s(quotas: Quotas, quota: Quota, num_tokens: int, now: float) -> float | None:
    exceeded = quotas.exceeded("k", quota, num_tokens, now)
    return exceeded.retry_after_s if exceeded is not None else None


def test_without_limits_everything_is_allowed() -> None:
    quotas = Quotas()
    for now in range(100):
        assert quotas.exceeded("k", NO_QUOTA, 10**9, now) is None
        quotas.begin("k", NO_QUOTA, 10**9, now)
    quotas.end("k", NO_QUOTA, 10**9, 100.0)


def test_so_many_requests_run_at_a_time_and_every_end_makes_room() -> None:
    quotas, quota = Quotas(), Quota(max_running_requests=2)
    for _ in range(40):
        for _ in range(2):
            assert quotas.exceeded("k", quota, 1, 0.0) is None
            quotas.begin("k", quota, 1, 0.0)
        exceeded = quotas.exceeded("k", quota, 1, 0.0)
        assert exceeded is not None
        assert "2 answers are running" in exceeded.message
        assert exceeded.retry_after_s is None, "nobody knows when an answer ends"
        for _ in range(2):
            quotas.end("k", quota, 5, 0.0)
    assert quotas.exceeded("other", quota, 1, 0.0) is None


def test_tokens_come_back_with_time_and_no_more_than_a_minutes() -> None:
    quotas = Quotas()
    quotas.begin("k", PER_MINUTE, 600, 0.0)
    assert wait_s(quotas, PER_MINUTE, 50, 0.0) == pytest.approx(5.0)
    assert wait_s(quotas, PER_MINUTE, 50, 3.0) == pytest.approx(2.0)
    assert wait_s(quotas, PER_MINUTE, 50, 5.0) is None
    quotas.begin("k", PER_MINUTE, 50, 5.0)
    quotas.begin("k", PER_MINUTE, 600, 1000.0)
    assert wait_s(quotas, PER_MINUTE, 10, 1000.0) == pytest.approx(1.0), "an hour's rest gives a minute's tokens"


def test_output_is_paid_when_it_is_known() -> None:
    quotas = Quotas()
    quotas.begin("k", PER_MINUTE, 100, 0.0)
    assert wait_s(quotas, PER_MINUTE, 500, 0.0) is None
    quotas.end("k", PER_MINUTE, 700, 0.0)
    assert wait_s(quotas, PER_MINUTE, 0, 0.0) == pytest.approx(20.0), "200 more than there were"


def test_a_prompt_larger_than_a_minutes_tokens_is_let_in_when_all_are_there() -> None:
    """It would be refused for ever otherwise; what follows waits for it."""
    quotas = Quotas()
    assert wait_s(quotas, PER_MINUTE, 1200, 0.0) is None
    quotas.begin("k", PER_MINUTE, 1200, 0.0)
    assert wait_s(quotas, PER_MINUTE, 10, 0.0) == pytest.approx(61.0)
