"""What a worker refuses of an order: ids that its model does not have, wherever something would look them up."""

import pytest
from twinpool.cluster.protocol.messages import Cancel, Grammar, GrantRequest, Message, Prefill, SamplingParams
from twinpool.engine.intake import refusal

VOCAB_SIZE = 100


def order(kind: type[Message], sampling: SamplingParams, token_ids: tuple[int, ...]) -> Message:
    own: dict[str, object] = {"arrival_order": 1}
    if kind is Prefill:
        own = {"generation": 1, "credit_bytes": 1, "receiver": "c/1", "receiver_addresses": ()}
    return kind.model_validate({"request_id": "r", "attempt": 3, "sampling": sampling, "token_ids": token_ids, **own})


@pytest.mark.parametrize("kind", [GrantRequest, Prefill])
@pytest.mark.parametrize(
    ("token_ids", "sampling", "named"),
    [
        ((5, 100, 7), SamplingParams(), 100),
        ((2**31 - 1,), SamplingParams(), 2**31 - 1),
        ((5,), SamplingParams(logit_bias={7: 1.0, 120: 1.0}), 120),
        ((5,), SamplingParams(stop_token_ids=(2, 130), min_tokens=1), 130),
        ((5,), SamplingParams(stop_token_ids=(140,), grammar=Grammar(kind="regex", source="a")), 140),
    ],
)
def test_an_id_beyond_the_vocabulary_is_named(
    kind: type[Message], token_ids: tuple[int, ...], sampling: SamplingParams, named: int
) -> None:
    failed = refusal(order(kind, sampling, token_ids), VOCAB_SIZE)
    assert failed is not None
    assert (failed.request_id, failed.attempt, failed.is_retryable) == ("r", 3, False)
    assert failed.reason == f"token id {named}; allowed are 0 to 99"


@pytest.mark.parametrize("kind", [GrantRequest, Prefill])
def test_the_last_ids_of_the_vocabulary_are_fine(kind: type[Message]) -> None:
    """So is a stop token that no logit is looked up for."""
    sampling = SamplingParams(logit_bias={99: 1.0}, stop_token_ids=(99,), min_tokens=1)
    assert refusal(order(kind, sampling, (0, 99)), VOCAB_SIZE) is None
    assert refusal(order(kind, SamplingParams(stop_token_ids=(500,)), ()), VOCAB_SIZE) is None


def test_other_messages_pass() -> None:
    assert refusal(Cancel(request_id="r", attempt=1), VOCAB_SIZE) is None
