"""The window of latencies that the page shows: right numbers, of bounded many answers."""

from typing import Any

from twinpool.router.job_record import FINISHED, JobRecord
from twinpool.router.recent import MAX_ANSWERS, MAX_GAPS, NUM_SHOWN, RecentLatencies


def record(*choices: list[float], outcome: str = FINISHED) -> JobRecord:
    times_s = dict(enumerate(choices))
    return JobRecord("r", "chat", "m", outcome, 100.0, 200.0, 1, sum(map(len, choices)), times_s, {})


def described(recent: RecentLatencies, key: str) -> dict[str, Any]:
    return recent.describe()[key]


def test_nothing_was_asked_yet() -> None:
    nothing = {"count": 0, "median_s": None, "p95_s": None, "recent_s": []}
    assert RecentLatencies().describe() == {"ttft": nothing, "itl": nothing}


def test_the_percentiles_are_values_that_occurred() -> None:
    """Nearest rank: of 1 to 20, 10 and 19."""
    recent = RecentLatencies()
    for i in range(20, 0, -1):
        recent.observe(record([100.0 + i]))
    ttft = described(recent, "ttft")
    assert (ttft["count"], ttft["median_s"], ttft["p95_s"]) == (20, 10.0, 19.0)
    assert ttft["recent_s"] == [float(i) for i in range(20, 0, -1)]
    assert described(recent, "itl")["count"] == 0


def test_every_choice_counts_and_only_of_requests_that_ended_well() -> None:
    recent = RecentLatencies()
    recent.observe(record([101.0, 102.0, 104.0], [], [103.0]))
    recent.observe(record([150.0, 160.0], outcome="timeout"))
    assert described(recent, "ttft")["recent_s"] == [1.0, 3.0]
    itl = described(recent, "itl")
    assert (itl["count"], itl["median_s"], itl["p95_s"], itl["recent_s"]) == (2, 1.0, 2.0, [1.5])


def test_the_window_is_bounded() -> None:
    recent = RecentLatencies()
    for _ in range(2 * MAX_ANSWERS):
        recent.observe(record([101.0 + i for i in range(50)]))
    ttft, itl = described(recent, "ttft"), described(recent, "itl")
    assert (ttft["count"], len(ttft["recent_s"])) == (MAX_ANSWERS, NUM_SHOWN)
    assert (itl["count"], len(itl["recent_s"])) == (MAX_GAPS, NUM_SHOWN)
