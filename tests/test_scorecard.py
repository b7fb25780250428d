"""The scorecard: every row is there once, with its numbers, and every test that it names exists."""

import re

import pytest
from evidence import ROOT, problems_of

SCORECARD = ROOT / "tests" / "SCORECARD.md"
RELIABILITY = [f"R{number}" for number in (*range(1, 12), *range(13, 25), 26)]
SECURITY = [f"S{number}" for number in (*range(1, 10), 14, 16, 19, 21)]
ROW = re.compile(r"^\| ([RS]\d+) \| (.*?) ?\| (.*?) ?\| (.*?) ?\| (.*?) ?\|$", re.MULTILINE)
NONE = "–"


def problems_in(scorecard: str) -> list[str]:
    rows = ROW.findall(scorecard)
    names = [name for name, *_ in rows]
    found = [] if names == RELIABILITY + SECURITY else [f"the rows are {names}"]
    for name, done, quick, slow, evidence in rows:
        found += [f"{name}: {problem}" for problem in [*empty(done, quick, slow), *problems_of(evidence)]]
        if (quick, slow) == (NONE, NONE) and not evidence.startswith("open: "):
            found.append(f"{name}: it has tests, and no numbers")
    return found


def empty(*columns: str) -> list[str]:
    return ["an empty column"] if "" in columns else []


def test_every_row_is_there_and_every_test_in_it_exists() -> None:
    assert problems_in(SCORECARD.read_text()) == []


OPEN = "| {name} | a | – | – | open: not yet |\n"
RIGHT = "".join(OPEN.format(name=name) for name in RELIABILITY + SECURITY)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("", "the rows are"),
        ("| R7 |  | 5 | – | open: not yet |\n", "an empty column"),
        ("| R7 | a | 5 |  | open: not yet |\n", "an empty column"),
        ("| R7 | a | 5 | – |  |\n", "neither a test"),
        ("| R7 | a | 5 | – | `tests/nowhere.py::test_x` |\n", "is no test"),
        ("| R7 | a | – | – | `tests/test_scorecard.py::test_the_check_sees_a_wrong_row` |\n", "no numbers"),
        (2 * OPEN.format(name="R7"), "the rows are"),
        (OPEN.format(name="R12"), "the rows are"),
    ],
)
def test_the_check_sees_a_wrong_row(wrong: str, problem: str) -> None:
    assert problems_in(RIGHT) == []
    assert [problem in found for found in problems_in(RIGHT.replace(OPEN.format(name="R7"), wrong))] == [True]
