"""How few tokens a text can have, known without tokenising it, which takes a second for each two megabytes.

So a prompt that is far too long is refused at once. Only for byte-level tokenizers that lose nothing of a text but
characters that they have no token for: all others are in tokens, none of which has more characters than the longest.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

LOSSLESS = {"ByteLevel", "Digits", "Split", "Sequence"}  # pre-tokenizers that only cut
MOST_COMPOSED = 4  # NFC makes one character of at most so many
FIRST_OF_MANY = 0x80  # bytes from here on are part of a longer character
CONTINUATIONS = range(FIRST_OF_MANY, 0xC0)  # each longer character has at least one of these


@dataclass(frozen=True)
class TokenBound:
    longest: int  # characters that one token stands for at most
    vanishing: tuple[str, ...]  # characters without a token

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least."""
        return -(-(len(text) - sum(map(text.count, self.vanishing))) // self.longest)


def bound_of(tokenizer: Tokenizer, byte_of_character: Mapping[str, int]) -> TokenBound | None:
    """Return what is known of a byte-level tokenizer; None where any character may vanish."""
    composed = _most_composed(_state(tokenizer.normalizer))
    names = tokenizer.get_vocab(with_added_tokens=True)
    missing = {byte for character, byte in byte_of_character.items() if character not in names}
    swallows = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    if composed is None or swallows or not _only_cuts(_state(tokenizer.pre_tokenizer)):
        return None
    if not missing.isdisjoint(CONTINUATIONS):
        return None
    vanishing = tuple(chr(byte) for byte in sorted(missing) if byte < FIRST_OF_MANY)
    return TokenBound(composed * max(map(len, names)), vanishing)


def _most_composed(normalizer: dict[str, Any] | None) -> int | None:
    if normalizer is None:
        return 1
    return MOST_COMPOSED if normalizer["type"] == "NFC" else None


def _only_cuts(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    parts = [pre_tokenizer, *pre_tokenizer.get("pretokenizers", [])]
    return all(part["type"] in LOSSLESS and part.get("behavior") != "Removed" for part in parts)


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())
