"""When a sequence ends by its tokens."""

import pytest
from twinpool.cluster.protocol.messages import Grammar, SamplingParams
from twinpool.engine.stopping import finish_reason

EOS = 2


@pytest.mark.parametrize(
    ("token", "number", "reason"),
    [
        (5, 1, None),
        (5, 7, None),
        (5, 8, "length"),
        (EOS, 1, None),  # before min_tokens
        (EOS, 2, None),
        (EOS, 3, "stop"),
        (9, 3, "stop"),
        (EOS, 8, "stop"),  # both at once: it said it was done
    ],
)
def test_the_reason(token: int, number: int, reason: str | None) -> None:
    sampling = SamplingParams(max_tokens=8, min_tokens=3, stop_token_ids=(EOS, 9))
    assert finish_reason(token, number, sampling) == reason


def test_one_token_of_one_is_the_last() -> None:
    assert finish_reason(5, 1, SamplingParams(max_tokens=1)) == "length"


def test_a_complete_grammar_ends_before_min_tokens() -> None:
    sampling = SamplingParams(
        max_tokens=8, min_tokens=5, stop_token_ids=(EOS,), grammar=Grammar(kind="regex", source="a")
    )
    assert finish_reason(EOS, 2, sampling) == "stop"
