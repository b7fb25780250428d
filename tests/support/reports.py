"""Figures that a test measured: pytest shows them with -s, and when the test fails."""

import sys


def report(line: str) -> None:
    sys.stderr.write(line + "\n")
