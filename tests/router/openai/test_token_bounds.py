"""The least number of tokens is never above the true one, and unknown where characters may vanish."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from twinpool.cluster.protocol.errors import InvalidRequestError
from twinpool.router.openai.token_bounds import bound_of
from twinpool.router.openai.tokenizer import ChatTokenizer, TokenLimit

ALPHABET = set(pre_tokenizers.ByteLevel.alphabet())
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def tokenizer_of(normalizer: Any = None, pre_tokenizer: Any = None, missing: str = "") -> Tokenizer:
    names = [*sorted(ALPHABET - set(missing)), "ab", "abab"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("a", "b"), ("ab", "ab")]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text).ids)


@given(text=st.text(alphabet="ab \né€😀ω\u0314\u0342\u0345ᄀ\u1161\u11a8", max_size=200))
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_no_text_has_fewer_tokens(text: str, normalizer: Any) -> None:
    tokenizer = tokenizer_of(normalizer)
    bound = bound_of(tokenizer, BYTES)
    assert bound is not None
    assert bound.longest == (4 if normalizer is None else 16)
    assert num_tokens(tokenizer, text) >= bound.fewest_tokens(text) >= len(text) / bound.longest


@given(text=st.text(alphabet="ab\x04z€😀\U000f1234", max_size=200))
def test_characters_without_a_token_do_not_count(text: str) -> None:
    """SmolLM2 has none for some control characters and for the first byte of some planes."""
    missing = {name for name, byte in BYTES.items() if byte in (0x04, ord("z"), 0xF3)}
    tokenizer = tokenizer_of(missing="".join(missing))
    bound = bound_of(tokenizer, BYTES)
    assert bound is not None
    assert bound.vanishing == ("\x04", "z")
    assert num_tokens(tokenizer, text) >= bound.fewest_tokens(text)


def test_the_bound_is_reached() -> None:
    tokenizer = tokenizer_of()
    bound = bound_of(tokenizer, BYTES)
    assert bound is not None
    assert num_tokens(tokenizer, "abab" * 50) == bound.fewest_tokens("abab" * 50) == 50
    composed = "\u03c9\u0314\u0342\u0345"
    assert len(normalizers.NFC().normalize_str(composed)) == 1


def test_an_added_token_may_be_the_longest() -> None:
    tokenizer = tokenizer_of()
    tokenizer.add_special_tokens([AddedToken("<|a long name|>")])
    bound = bound_of(tokenizer, BYTES)
    assert bound is not None
    assert bound.longest == len("<|a long name|>")


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizer_of(normalizer=normalizers.Lowercase()),
        tokenizer_of(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        tokenizer_of(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        tokenizer_of(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        tokenizer_of(missing=next(name for name, byte in BYTES.items() if byte == 0x85)),
    ],
)
def test_where_characters_may_vanish_nothing_is_known(tokenizer: Tokenizer) -> None:
    assert bound_of(tokenizer, BYTES) is None


def test_a_token_that_swallows_blanks_makes_it_unknown() -> None:
    tokenizer = tokenizer_of()
    tokenizer.add_special_tokens([AddedToken("<|a|>", lstrip=True)])
    assert bound_of(tokenizer, BYTES) is None


def test_what_may_fit_is_tokenised(tokenizer: ChatTokenizer) -> None:
    """The limit itself is no refusal: only what is certainly beyond it."""
    longest = max(len(name) for name in ("<|endoftext|>", "<|im_start|>"))
    limit = TokenLimit(10, "prompt")
    assert tokenizer.encode("x" * (10 * longest), True, limit)
    with pytest.raises(InvalidRequestError, match="131 characters, which are at least 11 tokens") as caught:
        tokenizer.encode("x" * (10 * longest + 1), True, limit)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
