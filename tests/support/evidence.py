"""What stands in the last column of a table that says which tests show what: tests that exist, or an honest "open"."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"`([^`]+)`")


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


def collected_in(path: Path) -> set[str]:
    """Return by name what pytest collects there: test functions, and the test cases of state machines."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(t.id for t in node.targets if isinstance(t, ast.Name) and t.id.startswith("Test"))
    return found
