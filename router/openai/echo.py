"""The prompt at the head of an answer that echoes it, in parts that are small enough for a line of a stream.

When the prompt is scored its text comes with its scores, part by part; else all at once before the first token.
Knows no JSON and no worker.
"""

from collections.abc import Sequence

from ...cluster.protocol.messages import SampledToken
from .choice import Piece, TokenDetail
from .prepare import Choice
from .text import Utf8Decoder
from .tokenizer import ChatTokenizer

# Some readers refuse lines above 128 KiB. A character takes up to 6 bytes, a token with 20 alternatives up to 7 KiB.
MAX_CHARACTERS = 16 * 1024
MAX_TOKENS = 16


class Echo:
    def __init__(self, choice: Choice, tokenizer: ChatTokenizer) -> None:
        request = choice.request
        self._index = choice.index
        self._text = choice.echo
        self._is_scored = request is not None and request.sampling.scores_prompt
        self._first = SampledToken(token=request.token_ids[0]) if request is not None else None
        self._tokenizer = tokenizer
        self._decoder = Utf8Decoder()
        self._offset = 0  # in the text, where the next token's begins
        self._num_shown = 0

    def push(self, scores: Sequence[SampledToken]) -> list[Piece]:
        """Take the next scores; the prompt's first token, of which nothing is said, comes with the first of them."""
        tokens = scores if self._first is None else [self._first, *scores]
        self._first = None
        return [self._scored_piece(tokens[i : i + MAX_TOKENS]) for i in range(0, len(tokens), MAX_TOKENS)]

    def rest(self) -> list[Piece]:
        """Return what has not been shown; nothing the second time."""
        pieces = self.push(()) if self._is_scored and self._first is not None else []
        while self._num_shown < len(self._text):
            pieces.append(Piece(self._index, self._show(self._num_shown + MAX_CHARACTERS)))
        return pieces

    def _scored_piece(self, tokens: Sequence[SampledToken]) -> Piece:
        details: list[TokenDetail] = []
        for token in tokens:
            details.append(TokenDetail(token, self._offset))
            self._offset += self._width(token.token)
        return Piece(self._index, self._show(self._offset), tuple(details))

    def _show(self, end: int) -> str:
        shown = self._text[self._num_shown : end]
        self._num_shown += len(shown)
        return shown

    def _width(self, token: int) -> int:
        """Return how many characters of the prompt the token stands for, which the tokenizer may have rewritten."""
        decoded = self._decoder.push(self._tokenizer.token_bytes(token))
        if self._text.startswith(decoded, self._offset):
            return len(decoded)
        if self._tokenizer.is_special(token):  # the tokenizer put it there
            return 0
        if decoded.startswith(" ") and self._text.startswith(decoded[1:], self._offset):  # likewise, before the text
            return len(decoded) - 1
        return min(len(decoded), len(self._text) - self._offset)
