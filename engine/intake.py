"""What a worker refuses of an order before anything is reserved for it: token ids that its model does not have.

The router's door checks the same. Here it protects the others: one such id fails the step of everybody in its batch.
"""

from ..cluster.protocol.messages import Failed, GrantRequest, Message, Prefill, SamplingParams


def refusal(message: Message, vocab_size: int) -> Failed | None:
    """Return the answer to an order that no model with so many token ids can carry out."""
    if not isinstance(message, GrantRequest | Prefill):
        return None
    largest = max(max(message.token_ids, default=0), _largest_id_read(message.sampling))
    if largest < vocab_size:
        return None
    reason = f"token id {largest}; allowed are 0 to {vocab_size - 1}"
    return Failed(request_id=message.request_id, attempt=message.attempt, reason=reason, is_retryable=False)


def _largest_id_read(sampling: SamplingParams) -> int:
    """Return the largest id whose logit the sampler touches; a stop token is only compared, until it is banned."""
    bans = sampling.min_tokens > 0 or sampling.grammar is not None
    return max(max(sampling.logit_bias, default=0), max(sampling.stop_token_ids, default=0) if bans else 0)
