"""Choose the next token of each row: a pure function of logits, parameters, seed, position and token history.

The last thing a step does. There is no generator state: the noise of a draw is a function of (seed, position, token
id), so neither batch mates nor an earlier attempt of the same request can change a choice.

Order, per row: logit_bias; min_tokens bans stop tokens; repetition penalty (over prompt and output), then frequency
and presence penalties (over output only); a grammar bans what it does not allow; greedy rows take the maximum. Others
divide by the temperature, then min_p, top_k and top_p cut, each over what the one before left; tokens that tie with
the last one kept are kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cluster.protocol.messages import SampledToken, SamplingParams
from .grammar import Mask

MIN_LOGPROB = -9999.0  # JSON knows no infinity
SCORED_TOKENS_AT_ONCE = 32  # bounds the copies of their logits: float32, of the whole vocabulary each
TOP_P_SHORTLISTS = (64, 1024)  # nearly always one of these is enough, and far quicker than sorting the vocabulary


@dataclass(frozen=True)
class SamplingRow:
    """Whose token is chosen: `token_ids` are the prompt and the output so far; `allowed` `[vocab]` is a grammar's."""

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    allowed: Mask | None = None

    @property
    def position(self) -> int:
        """Index of the token to choose among the request's output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Choose one token a row of `logits` `[rows, vocab]`, which stay as they are.

    Log-probabilities are those of the model itself: the log-softmax of the raw logits, before bias, penalties,
    temperature and cuts.
    """
    raw = logits.float()
    adjusted = raw.clone() if any(_is_adjusted(row) for row in rows) else raw
    for scores, row in zip(adjusted, rows, strict=True):
        if _is_adjusted(row):
            _adjust(scores, row)
    tokens: list[int] = adjusted.argmax(dim=-1).tolist()
    for i, row in enumerate(rows):
        if not row.params.is_greedy:
            tokens[i] = _draw(adjusted[i], row)
    return [_with_logprobs(raw[i], token, row.params) for i, (token, row) in enumerate(zip(tokens, rows, strict=True))]


@torch.inference_mode()
def score(logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[SampledToken]:
    """Return the log-probability of each of `token_ids` under its row of `logits` `[tokens, vocab]`."""
    scored: list[SampledToken] = []
    for start in range(0, len(token_ids), SCORED_TOKENS_AT_ONCE):
        tokens = token_ids[start : start + SCORED_TOKENS_AT_ONCE]
        logprobs = logits[start : start + len(tokens)].float().log_softmax(dim=-1).clamp_(min=MIN_LOGPROB)
        own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device).unsqueeze(1)).squeeze(1).tolist()
        best = logprobs.topk(min(num_logprobs, logprobs.shape[1]), dim=-1)
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for token, logprob, (ids, values) in zip(tokens, own, tops, strict=True):
            scored.append(SampledToken(token=token, logprob=logprob, top=tuple(zip(ids, values, strict=True))))
    return scored


def _is_adjusted(row: SamplingRow) -> bool:
    params = row.params
    penalties = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty - 1.0)
    return _bans_stop_tokens(row) or bool(params.logit_bias) or any(penalties) or row.allowed is not None


def _bans_stop_tokens(row: SamplingRow) -> bool:
    """True below min_tokens, but not where a grammar allows nothing else: it is complete, so the output must end."""
    stop_token_ids = list(row.params.stop_token_ids)
    if row.position >= row.params.min_tokens or not stop_token_ids:
        return False
    return row.allowed is None or int(row.allowed.sum()) > int(row.allowed[stop_token_ids].sum())


def _adjust(scores: Tensor, row: SamplingRow) -> None:
    """Apply bias, bans and penalties to `scores` `[vocab]` in place."""
    params = row.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores.index_add_(0, ids, torch.tensor(list(params.logit_bias.values()), device=scores.device))
    if _bans_stop_tokens(row):
        scores[torch.tensor(params.stop_token_ids, device=scores.device)] = float("-inf")
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(row.token_ids, device=scores.device).unique()
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and row.position > 0:
        output = torch.tensor(row.token_ids[row.num_prompt_tokens :], device=scores.device)
        seen, counts = output.unique(return_counts=True)
        scores[seen] -= params.frequency_penalty * counts + params.presence_penalty
    if row.allowed is not None:
        scores.masked_fill_(~torch.from_numpy(row.allowed).to(scores.device), float("-inf"))


def _draw(scores: Tensor, row: SamplingRow) -> int:
    """Draw from softmax(scores / temperature) after the cuts, by the Gumbel-max trick.

    A tiny change of the logits changes the choice only where two perturbed scores nearly tie.
    """
    scaled = scores / row.params.temperature
    noise = gumbel_noise(row.params.seed, row.position, scaled.shape[0]).to(scaled.device)
    return int(scaled.masked_fill(scaled < _threshold(scaled, row.params), float("-inf")).add_(noise).argmax())


def _threshold(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Return the least score that min_p, top_k and top_p leave."""
    threshold = scaled.new_full((), float("-inf"))
    if params.min_p > 0.0:
        threshold = scaled.max() + math.log(params.min_p)
    if 0 < params.top_k < scaled.shape[0]:
        threshold = torch.maximum(threshold, scaled.topk(params.top_k).values[-1])
    if params.top_p < 1.0:
        left = scaled.masked_fill(scaled < threshold, float("-inf"))
        threshold = torch.maximum(threshold, _top_p_threshold(left, params.top_p))
    return threshold


def _top_p_threshold(scaled: Tensor, top_p: float) -> Tensor:
    """Return the score of the last token of the smallest set, best first, whose probability reaches `top_p`."""
    log_total = scaled.logsumexp(dim=0)
    for size in (*TOP_P_SHORTLISTS, scaled.shape[0]):
        best = scaled.topk(min(size, scaled.shape[0])).values
        reached = (best - log_total).exp().cumsum(dim=0) >= top_p
        if reached[-1]:
            return best[reached.int().argmax()]
    return scaled.min()  # rounding kept the sum just below top_p


def gumbel_noise(seed: int, position: int, num_tokens: int) -> Tensor:
    """Return Gumbel(0, 1) noise for token ids below `num_tokens`: a function of (seed, position, token id) alone.

    The random bits are Philox 4x64's (Salmon et al., 2011) under the key (seed, position), two tokens a word.
    """
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw((num_tokens + 1) // 2)
    bits = words.astype("<u8", copy=False).view("<u4")[:num_tokens]
    # u in (0, 1): float32 resolves it finely near 0, where the large values come from, and must not round it up to 1.
    uniform = torch.from_numpy((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32))
    return -torch.log(-torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-24)))


def _with_logprobs(raw: Tensor, token: int, params: SamplingParams) -> SampledToken:
    if params.num_logprobs is None:
        return SampledToken(token=token)
    return score(raw.unsqueeze(0), [token], params.num_logprobs)[0]
