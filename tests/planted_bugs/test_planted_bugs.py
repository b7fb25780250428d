"""The tests are tested: each known bug, planted in a copy of the product, turns the tests red that are named for it.

All of them run in `make test-slow` and in `make planted-bugs`. `make test` runs three, and checks that the others can
still be planted and that their tests exist.
"""

from dataclasses import replace

import planted_bugs
import pytest
from evidence import collected_in
from planted_bugs import Bug, load_bugs, planted, run_with, run_without

BUGS = {bug.name: bug for bug in load_bugs()}
QUICK = ("checksum-ignored", "credits-ignored", "heartbeat-taken-for-progress")
# The bugs that the field has had, and that every transfer of KV between two workers is prone to.
CLASSES = {
    "the checksum is skipped": ("checksum-ignored", "checksum-not-computed"),
    "the generation is not checked": ("generation-ignored", "generation-given-twice"),
    "blocks are free before the ack": (
        "freed-before-the-ack",
        "ack-believed-too-early",
        "freed-while-the-sender-sends",
    ),
    "expired leases are swept with new work only": ("swept-only-with-work", "loop-sleeps-past-deadlines"),
    "there is no lease": ("no-lease", "lease-of-the-ack-missing"),
    "a failure is swallowed": ("failure-swallowed", "closed-transfer-swallowed", "closed-connection-keeps-blocks"),
    "a block is freed twice": ("double-free",),
    "the layer is wrong": ("wrong-layer",),
    "a cancel is lost": ("cancel-not-sent", "cancel-lost-on-its-way"),
    "Done is taken with frames missing": ("done-with-frames-missing", "done-overtakes-frames"),
    "a duplicate is handled twice": ("duplicate-grant-reserves-twice", "first-token-twice"),
    "the router does not renew": ("no-renewals",),
    "a retry is taken for the first try": ("attempt-number-reused", "old-attempt-believed", "late-frames-written"),
    "sampling depends on more than it may": ("batch-mates-matter",),
    "a heartbeat is taken for progress": ("heartbeat-taken-for-progress", "heartbeat-invents-progress"),
    "credits are ignored": ("credits-ignored",),
    "a sequence loses its tokens": ("resumed-without-its-tokens", "wrong-position-after-a-retry", "gap-ignored"),
}


def quick_bug(name: str) -> Bug:
    """Return a bug whose one test takes no time, and which this module may change."""
    bug = BUGS[name]
    return replace(bug, tests=bug.tests[:1])


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_can_still_be_planted(name: str) -> None:
    """Whoever changes its lines finds another place for it; what it changes is code that still compiles."""
    bug = BUGS[name]
    source = (planted_bugs.ROOT / bug.file).read_text()
    changed = planted(bug, source)
    assert changed != source
    compile(changed, bug.file, "exec")
    assert bug.tests, "no test is named for it"


@pytest.mark.parametrize("name", BUGS)
def test_every_test_that_is_named_exists(name: str) -> None:
    for test in BUGS[name].tests:
        path, function = test.partition("[")[0].split("::")
        assert function in collected_in(planted_bugs.ROOT / path), f"there is no test {test}"


def test_every_class_of_bug_that_must_be_caught_is_there() -> None:
    assert {name for names in CLASSES.values() for name in names} <= set(BUGS)
    assert len(CLASSES) >= 15


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_one_is_caught(name: str) -> None:
    bug = quick_bug(name)
    run = run_with(bug)
    assert all(run.is_red(test) for test in bug.tests), run.account(bug.tests)


def test_a_change_that_breaks_nothing_is_not_caught() -> None:
    """The measure itself: what leaves the tests green must not count."""
    bug = quick_bug("heartbeat-taken-for-progress")
    run = run_with(replace(bug, after=bug.before))
    assert run.is_green(bug.tests[0])
    assert not run.is_red(bug.tests[0])


@pytest.mark.parametrize("after", ["if nowhere:", "if no syntax:"])
def test_code_that_breaks_in_another_way_is_not_caught(after: str) -> None:
    """A module that cannot be imported, or that raises whatever it is asked, says nothing about the tests."""
    bug = quick_bug("heartbeat-taken-for-progress")
    run = run_with(replace(bug, after=after))
    assert not run.is_green(bug.tests[0])
    assert not run.is_red(bug.tests[0])


def test_lines_that_have_changed_are_named() -> None:
    bug = BUGS["no-lease"]
    with pytest.raises(ValueError, match="no-lease: its lines occur 0 times in kvtransfer"):
        planted(bug, "nothing of the kind")
    with pytest.raises(ValueError, match="occur 2 times"):
        planted(bug, bug.before * 2)


@pytest.mark.slow
@pytest.mark.timeout(planted_bugs.MAX_RUN_S + 60)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    """Every test that is named for it goes red, by what it says and not because the code no longer runs."""
    run = run_with(BUGS[name])
    assert all(run.is_red(test) for test in BUGS[name].tests), run.account(BUGS[name].tests)


@pytest.mark.slow
@pytest.mark.timeout(planted_bugs.MAX_RUN_S + 60)
def test_without_a_bug_every_test_that_is_named_is_green() -> None:
    run = run_without(list(BUGS.values()))
    tests = {test for bug in BUGS.values() for test in bug.tests}
    assert all(run.is_green(test) for test in tests), run.account(test for test in tests if not run.is_green(test))
