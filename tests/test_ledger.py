"""The ledger of known failures: every case has its row, and every test that a row names exists."""

import re

import pytest
from evidence import ROOT, problems_of

LEDGER = ROOT / "tests" / "LEDGER.md"
NUM_CASES = 40
ROW = re.compile(r"^\| (\d+) \| (\S.*?) \| (\S.*?) \| (.*?) ?\|$", re.MULTILINE)


def problems_in(ledger: str) -> list[str]:
    rows = ROW.findall(ledger)
    numbers = [int(number) for number, *_ in rows]
    found = [] if numbers == list(range(1, NUM_CASES + 1)) else [f"the cases are {numbers}"]
    return found + [f"case {number}: {problem}" for number, *_, evidence in rows for problem in problems_of(evidence)]


def test_every_case_has_a_row_and_every_test_in_it_exists() -> None:
    assert problems_in(LEDGER.read_text()) == []


@pytest.mark.parametrize(
    ("evidence", "problem"),
    [
        ("", "neither a test"),
        ("it is fine", "neither a test"),
        ("open:", "neither a test"),
        ("cannot happen: so it is", "no module"),
        ("cannot happen: see `router/nowhere.py`", "is not there"),
        ("`tests/test_ledger.py::test_that_is_not_there`", "is no test"),
        ("`tests/test_ledger.py::problems_in`", "is no test"),
        ("`tests/nowhere.py::test_x`", "is no test"),
    ],
)
def test_the_check_sees_a_wrong_row(evidence: str, problem: str) -> None:
    assert [problem in found for found in problems_of(evidence)] == [True]


@pytest.mark.parametrize("wrong", ["| 41 | a | b | open: not yet |\n", "| 2 | a | b | open: not yet |\n"])
def test_the_check_counts_the_cases(wrong: str) -> None:
    right = "".join(f"| {number} | a | b | open: not yet |\n" for number in range(1, NUM_CASES + 1))
    assert problems_in(right) == []
    assert len(problems_in(right + wrong)) == 1
    assert len(problems_in(right.replace("| 7 | a | b | open: not yet |\n", ""))) == 1
