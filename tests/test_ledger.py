"""The ledger of known failures: every case has its row, and every test that a row names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEDGER = ROOT / "tests" / "LEDGER.md"
NUM_CASES = 40
ROW = re.compile(r"^\| (\d+) \| (\S.*?) \| (\S.*?) \| (.*?) ?\|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")


def collected_in(path: Path) -> set[str]:
    """Return by name what pytest collects there: test functions, and the test cases of state machines."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(t.id for t in node.targets if isinstance(t, ast.Name) and t.id.startswith("Test"))
    return found


def problems_of(evidence: str) -> list[str]:
    """Return what is wrong with the last column of a row."""
    quoted = CODE.findall(evidence)
    tests = [name for name in quoted if "::" in name]
    modules = [name for name in quoted if "::" not in name and name.endswith(".py")]
    is_impossible, is_open = "cannot happen: " in evidence, re.search(r"open: \S+ \S+", evidence)
    problems = [f"{name} is not there" for name in modules if not (ROOT / name).is_file()]
    for path, _, name in (test.partition("::") for test in tests):
        if not (ROOT / path).is_file() or name not in collected_in(ROOT / path):
            problems.append(f"{path}::{name} is no test")
    if is_impossible and not modules:
        problems.append("no module is named that makes it impossible")
    if not (tests or is_impossible or is_open):
        problems.append("neither a test, nor a reason why it cannot happen, nor open")
    return problems


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
        ("`tests/test_ledger.py::collected_in`", "is no test"),
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
