"""When a sequence ends by its tokens. Pure; stop strings are the router's business, for it has the text."""

from ..cluster.protocol.messages import FinishReason, SamplingParams


def finish_reason(token: int, num_output_tokens: int, sampling: SamplingParams) -> FinishReason | None:
    """Return why a sequence ends with `token` as its `num_output_tokens`-th output token, or None if it goes on."""
    # Below min_tokens a stop token is chosen only where a grammar left nothing else (see sampler.py).
    if token in sampling.stop_token_ids and (num_output_tokens >= sampling.min_tokens or sampling.grammar is not None):
        return "stop"
    return "length" if num_output_tokens >= sampling.max_tokens else None
