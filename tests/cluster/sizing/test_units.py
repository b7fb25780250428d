"""Quantities in words: one of a kind has no plural, and a chunk that does not exist is no negative number."""

from math import inf

import pytest
from twinpool.cluster.sizing.units import counted, format_chunk


@pytest.mark.parametrize(
    ("num", "words"),
    [(0, "0 cached tokens"), (1, "1 cached token"), (2, "2 cached tokens"), (1200, "1,200 cached tokens")],
)
def test_only_one_has_no_plural(num: int, words: str) -> None:
    assert counted(num, "cached token") == words


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(-1.0, "none"), (-inf, "none"), (0.9, "none"), (1.0, "1 token"), (121.4, "121 tokens"), (inf, "any")],
)
def test_a_chunk_has_at_least_one_token(tokens: float, words: str) -> None:
    assert format_chunk(tokens) == words
