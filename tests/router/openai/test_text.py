"""Held-back characters and stop strings: no chunking may change what a client reads."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from twinpool.router.openai.text import StopMatcher, Utf8Decoder

NARROW_TEXT = st.text(alphabet="ab\n", max_size=40)


def cut(items: str | bytes, places: list[int]) -> list[str] | list[bytes]:
    borders = sorted({0, len(items), *(place % (len(items) + 1) for place in places)})
    return [items[a:b] for a, b in pairwise(borders)]


def first_complete_stop(text: str, stops: list[str]) -> int | None:
    """Return where the text is cut by the definition: the earliest end wins, among equal ends the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


@given(st.binary(max_size=60), st.lists(st.integers(0, 1000), max_size=20))
def test_decoder_joins_to_the_text_of_all_bytes(data: bytes, places: list[int]) -> None:
    """Any bytes, cut anywhere, give what decoding them at once gives."""
    decoder = Utf8Decoder()
    pieces = [decoder.push(part) for part in cut(data, places)]
    assert "".join(pieces) + decoder.flush() == data.decode("utf-8", "replace")


@given(st.text(max_size=40), st.lists(st.integers(0, 1000), max_size=20))
def test_decoder_never_shows_half_a_character(text: str, places: list[int]) -> None:
    """Whole text never becomes U+FFFD, and every piece is a continuation of the text."""
    decoder, seen = Utf8Decoder(), ""
    for part in cut(text.encode(), places):
        seen += decoder.push(part)
        assert text.startswith(seen)
    assert seen == text
    assert decoder.flush() == ""


def test_decoder_flushes_a_cut_tail_once() -> None:
    """Two of four bytes are one replacement character at the end."""
    decoder = Utf8Decoder()
    assert decoder.push("😀".encode()[:2]) == ""
    assert decoder.flush() == "\ufffd"


@given(
    NARROW_TEXT,
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4),
    st.lists(st.integers(0, 1000), max_size=20),
)
def test_matcher_cuts_where_the_definition_says(text: str, stops: list[str], places: list[int]) -> None:
    """Whatever the chunks: the text before the first complete stop string is sent, nothing else."""
    matcher, sent, is_stopped = StopMatcher(stops), "", False
    for part in cut(text, places):
        shown, is_stopped = matcher.push(part)
        sent += shown
        if is_stopped:
            break
    expected = first_complete_stop(text, stops)
    assert is_stopped == (expected is not None)
    assert sent + matcher.flush() == text[:expected]


@given(NARROW_TEXT, st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4))
def test_matcher_holds_back_only_what_may_begin_a_stop(text: str, stops: list[str]) -> None:
    """Held is exactly the longest suffix that is a proper prefix of a stop string."""
    matcher, sent = StopMatcher(stops), ""
    for end, character in enumerate(text, start=1):
        shown, is_stopped = matcher.push(character)
        sent += shown
        if is_stopped:
            return
        suffixes = (text[start:end] for start in range(end))
        held = next((s for s in suffixes if any(stop.startswith(s) and stop != s for stop in stops)), "")
        assert sent + held == text[:end]


@pytest.mark.timeout(20)
def test_matcher_is_linear_in_the_text() -> None:
    """A stop string made to defeat backtracking: 40,000 characters that all may begin it."""
    matcher = StopMatcher(["a" * 4000 + "b"])
    assert not any(matcher.push("a" * 100)[1] for _ in range(400))
