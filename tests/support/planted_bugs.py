"""Plant known bugs in a copy of the product, one at a time, and see that the tests named for each of them go red.

    python tests/support/planted_bugs.py              # all of them, as `make planted-bugs` does
    python tests/support/planted_bugs.py no-lease     # only this one

A bug is a file `tests/planted_bugs/NAME.toml`: a place in the product, the lines there before and after, why it would
matter, and the tests that must notice. Red counts only when a test itself says so: by an assertion, by its time limit,
or because what it unpacks is not there. A bug that keeps a module from being imported says nothing about the tests.
Also a pytest plugin, which notes how tests end.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "planted_bugs"
NOTES = "TWINPOOL_TEST_NOTES"  # the environment variable that names the file for the plugin's notes
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
MAX_TEST_S, MAX_RUN_S = 60, 300


@dataclass(frozen=True)
class Bug:
    name: str
    what: str
    why: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Note:
    """How one phase (setup, call, teardown) of one test ended."""

    test: str
    is_passed: bool
    is_told: bool  # it failed by what the test says, not because the code broke in some other way
    error: str


@dataclass(frozen=True)
class Run:
    notes: tuple[Note, ...]
    output: str
    seconds: float

    def of(self, test: str) -> list[Note]:
        """Return what was noted of `test`, which may be a function with parameters or a state machine."""
        return [note for note in self.notes if note.test == test or note.test.startswith((f"{test}[", f"{test}::"))]

    def is_green(self, test: str) -> bool:
        return bool(self.of(test)) and all(note.is_passed for note in self.of(test))

    def is_red(self, test: str) -> bool:
        return any(note.is_told for note in self.of(test))

    def account(self, tests: Iterable[str]) -> str:
        """Return for a person how `tests` ended."""
        errors = {test: [note.error for note in self.of(test) if not note.is_passed] for test in tests}
        lines = [
            f"{test}: {'; '.join(each) or 'passed' if self.of(test) else 'did not run'}"
            for test, each in errors.items()
        ]
        return "\n".join([*lines, self.output[-3000:]])


def load_bugs() -> list[Bug]:
    return [_load(path) for path in sorted(FOLDER.glob("*.toml"))]


def planted(bug: Bug, source: str) -> str:
    """Return `source` with the bug in it. Raises ValueError when its lines are not there exactly once."""
    number = source.count(bug.before)
    if number != 1:
        raise ValueError(
            f"{bug.name}: its lines occur {number} times in {bug.file}, they must occur once:\n{bug.before}"
        )
    return source.replace(bug.before, bug.after)


@contextmanager
def copy_of_the_product(bug: Bug | None = None) -> Iterator[Path]:
    """Yield a folder that holds package and tests, with `bug` planted; it is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder) / "twinpool"
        shutil.copytree(ROOT, root, ignore=LEFT_OUT)
        if bug is not None:
            path = root / bug.file
            path.write_text(planted(bug, path.read_text()))
        yield root


def run_tests(root: Path, tests: Iterable[str]) -> Run:
    """Run `tests` in the copy at `root`, against the copy."""
    started_s = time.monotonic()
    notes = root.parent / "notes.jsonl"
    notes.touch()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))},
        "PYTHONPATH": f"{root.parent}:{root / 'tests' / 'support'}",  # before the installed package
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # loading all that is installed takes longer than most tests
        NOTES: str(notes),
    }
    plugins = ["-p", "planted_bugs", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "--tb=short"]
    command += ["--hypothesis-seed=0", f"--timeout={MAX_TEST_S}", *tests]
    with (root.parent / "output").open("w+") as output:
        try:
            subprocess.run(command, cwd=root, env=environment, stdout=output, stderr=output, timeout=MAX_RUN_S)
        except subprocess.TimeoutExpired:
            output.write(f"the tests did not end within {MAX_RUN_S} s")
        output.seek(0)
        lines = [Note(**json.loads(line)) for line in notes.read_text().splitlines()]
        return Run(tuple(lines), output.read(), time.monotonic() - started_s)


def run_with(bug: Bug) -> Run:
    with copy_of_the_product(bug) as root:
        return run_tests(root, bug.tests)


def run_without(bugs: Sequence[Bug]) -> Run:
    """Run everything that is named by `bugs`, without any of them."""
    with copy_of_the_product() as root:
        return run_tests(root, sorted({test for bug in bugs for test in bug.tests}))


def pytest_configure() -> None:
    """A failure is all that counts here: no time is spent on making hypothesis' example of it small."""
    if NOTES in os.environ:
        settings.register_profile("first failure", phases=[Phase.generate], report_multiple_bugs=False)
        settings.load_profile("first failure")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if NOTES in os.environ and not report.skipped:
        error = call.excinfo.value if call.excinfo else None
        text = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0][:200]
        note = Note(item.nodeid, not report.failed, error is not None and _is_told(error), text)
        with Path(os.environ[NOTES]).open("a") as notes:
            notes.write(json.dumps(vars(note)) + "\n")
    return report


def main(arguments: Sequence[str]) -> int:
    """Print which tests catch each bug; return 1 when one is not caught, or a test is red without any bug."""
    parser = argparse.ArgumentParser(
        description="Plant bugs in a copy of the product, and run the tests named for them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a bug in tests/planted_bugs; all when none is named")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once (%(default)s)")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in load_bugs() if not options.names or bug.name in options.names]
    if unknown := set(options.names) - {bug.name for bug in bugs}:
        parser.error(f"there is no bug named {', '.join(sorted(unknown))}; hint: they are the files in {FOLDER}")
    return 0 if _are_caught(bugs, options.jobs) else 1


def _are_caught(bugs: Sequence[Bug], num_jobs: int) -> bool:
    clean = run_without(bugs)
    red = sorted({test for bug in bugs for test in bug.tests if not clean.is_green(test)})
    accounts = [f"without any bug:\n{clean.account(red)}"] if red else []
    num_caught = 0
    with ThreadPoolExecutor(num_jobs) as pool:
        for bug, run in zip(bugs, pool.map(run_with, bugs), strict=True):
            missed = [test for test in bug.tests if not run.is_red(test)]
            num_caught += not missed
            accounts += [f"with {bug.name}:\n{run.account(missed)}"] if missed else []
            print(f"{bug.name:34} {run.seconds:5.1f} s  {bug.what}")
            for test in bug.tests:
                print(f"  {'MISSED BY' if test in missed else 'caught by'} {test}")
    print(f"{num_caught} of {len(bugs)} planted bugs are caught; without them the tests took {clean.seconds:.1f} s")
    for account in accounts:
        print(f"\n{account}")
    return not accounts


def _load(path: Path) -> Bug:
    fields = tomllib.loads(path.read_text())
    return Bug(path.stem, **{**fields, "tests": tuple(fields["tests"])})


def _is_told(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):  # hypothesis found more than one way to fail
        return all(_is_told(each) for each in error.exceptions)
    return isinstance(error, AssertionError | pytest.fail.Exception | queue.Empty) or _is_missed(error)


def _is_missed(error: BaseException) -> bool:
    """True when a line of a test, and nothing below it, found less or more than it expected."""
    frame, *_ = [None, *traceback.walk_tb(error.__traceback__)][::-1]
    is_of_a_test = frame is not None and Path(frame[0].f_code.co_filename).name.startswith("test_")
    return is_of_a_test and isinstance(error, ValueError | LookupError | StopIteration)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
