"""The restart rule and how exits are put into words."""

import pytest
from twinpool.cluster.launch.restarts import RestartPolicy, Restarts, describe_exit


def test_delay_doubles_up_to_the_limit() -> None:
    """Deaths far enough apart to be borne are answered 0.2 s, 0.4 s, … and never later than 10 s."""
    restarts = Restarts(RestartPolicy())
    delays = [restarts.died(now_s=8.0 * i, lifetime_s=8.0) for i in range(9)]
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0])


def test_five_deaths_in_thirty_seconds_are_too_many() -> None:
    restarts = Restarts(RestartPolicy())
    assert [restarts.died(now_s=float(i), lifetime_s=0.5) is None for i in range(5)] == [False] * 4 + [True]


def test_a_long_life_starts_the_backoff_anew() -> None:
    restarts = Restarts(RestartPolicy())
    restarts.died(0.0, 1.0)
    restarts.died(40.0, 8.0)
    assert restarts.died(100.0, 60.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exited with code 0"),
        (1, "exited with code 1"),
        (2, "exited with code 2: its configuration is wrong"),
        (3, "exited with code 3: the router refused it"),
        (4, "exited with code 4: its engine loop hung"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
    ],
)
def test_exits_in_words(returncode: int, words: str) -> None:
    assert describe_exit(returncode) == words
