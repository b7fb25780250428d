"""Output tokens to text, piece by piece: half characters and half stop strings are held back until they are decided.

Stands between the tokens of the dispatching side and the text of an answer, streamed or not: both are made here, so
the joined stream is the non-streamed text. Knows no tokenizer (it is given the bytes of a token) and no HTTP.
"""

import codecs
from collections.abc import Sequence


class Utf8Decoder:
    """Bytes to text; a character whose bytes have not all arrived is held back. Constant work a byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return what is held back: U+FFFD for a character that was cut off, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Find the stop string that is complete first, whatever the chunks, and hold back no more than could begin one.

    The text ends before the match, with `includes_stop` behind it. Of several that end with the same character the
    longest wins. One Knuth-Morris-Pratt automaton a stop string, so a character costs constant time however the stop
    strings are made.
    """

    def __init__(self, stops: Sequence[str], includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        self._stops = tuple(stops)
        self._borders = [_border_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)  # length of the longest prefix of the stop that the text ends with
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to send, and whether a stop string was matched (the rest is then dropped)."""
        if not self._held and self._first_characters.isdisjoint(text):
            return text, False
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            matched = self._advance(buffer[end - 1])
            if matched:
                self._held = ""
                return buffer[: end if self._includes_stop else end - matched], True
        safe = len(buffer) - max(self._states)
        self._held = buffer[safe:]
        return buffer[:safe], False

    def flush(self) -> str:
        """Return the held text: the answer ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        longest_match = 0
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            state = self._states[index]
            while state and stop[state] != character:
                state = borders[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                longest_match = max(longest_match, state)
                state = borders[state - 1]
            self._states[index] = state
        return longest_match


def _border_table(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
