"""The sampler against closed forms: distributions, cuts, penalties, and that nothing but a row's own state counts."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from twinpool.cluster.protocol.messages import SampledToken, SamplingParams
from twinpool.engine.sampler import MIN_LOGPROB, SamplingRow, gumbel_noise, sample, score

VOCAB_SIZE = 12
NUM_DRAWS = 3000
CHI_SQUARE_11_P_1E4 = 37.4  # exceeded with probability 1e-4 at 11 degrees of freedom


def logits_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def choose(logits: torch.Tensor, prompt: list[int], output: list[int], **params: Any) -> SampledToken:
    row = SamplingRow(SamplingParams(**params), [*prompt, *output], len(prompt))
    return sample(logits.unsqueeze(0), [row])[0]


def draw_many(logits: torch.Tensor, *, over: str = "position", **params: Any) -> torch.Tensor:
    """Count the tokens of NUM_DRAWS draws that differ in position or in seed alone."""
    by_position = over == "position"
    rows = [
        SamplingRow(SamplingParams(seed=5 if by_position else i, **params), range(1 + i * by_position), 1)
        for i in range(NUM_DRAWS)
    ]
    tokens = [token.token for token in sample(logits.expand(NUM_DRAWS, -1), rows)]
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[0])


def assert_distributed(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square over the tokens that can occur; the others must not."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() * counts.sum()
    assert expected.min() > 5, "the test's own distribution is too thin for chi-square"
    assert ((counts[possible] - expected) ** 2 / expected).sum() < CHI_SQUARE_11_P_1E4


FLAT_LOGITS = torch.linspace(-1.5, 1.5, VOCAB_SIZE)


@pytest.mark.parametrize("over", ["position", "seed"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float, over: str) -> None:
    """Over positions of one seed and over seeds at one position alike."""
    counts = draw_many(FLAT_LOGITS, over=over, temperature=temperature)
    assert_distributed(counts, (FLAT_LOGITS / temperature).softmax(0))


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """The noise of one (seed, position) tells nothing about that of the next."""
    base = gumbel_noise(7, 3, 20_000)
    for seed, position in ((7, 4), (8, 3), (-7, 3), (3, 7)):
        other = gumbel_noise(seed, position, 20_000)
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.03


def test_noise_is_gumbel() -> None:
    """Mean is Euler's constant, variance pi^2 / 6, and every value finite, for the extreme seeds too."""
    for seed in (0, 2**63 - 1, -(2**63)):
        noise = gumbel_noise(seed, 10**6, 200_000)
        assert noise.isfinite().all()
        assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
        assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_noise_is_read_by_token_id() -> None:
    """A token's noise does not depend on how many tokens there are."""
    assert torch.equal(gumbel_noise(1, 2, 1000)[:501], gumbel_noise(1, 2, 501))


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    num_output_tokens=st.integers(0, 9),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 6),
    top_p=st.floats(0.0, 1.0),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    num_mates=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_batch_mates_change_nothing(num_mates: int, num_output_tokens: int, **params: Any) -> None:
    """A row alone and the same row after others choose the same token with the same log-probabilities."""
    row = SamplingRow(SamplingParams(num_logprobs=2, **params), list(range(1 + num_output_tokens)), 1)
    mates = [SamplingRow(SamplingParams(seed=i, presence_penalty=1.0), [i, i, 3], 1) for i in range(num_mates)]
    logits = logits_of(num_mates + 1, VOCAB_SIZE, seed=num_mates)
    before = logits.clone()
    alone = sample(logits[-1:], [row])[0]
    assert sample(logits, [*mates, row])[-1] == alone
    assert torch.equal(logits, before)


def test_a_tiny_change_of_the_logits_rarely_changes_the_choice() -> None:
    """What makes a retried stream continue alike although another machine's sums differ in the last bits."""
    logits = logits_of(1000)
    nudged = logits + 1e-5 * logits_of(1000, seed=2)
    same = sum(
        choose(logits, [0], [0] * i, temperature=0.8, seed=3) == choose(nudged, [0], [0] * i, temperature=0.8, seed=3)
        for i in range(300)
    )
    assert same >= 299


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}])
def test_greedy_takes_the_first_maximum(params: dict[str, Any]) -> None:
    """Equal logits are common in bfloat16; the choice among them must not depend on the batch."""
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0])
    assert choose(logits, [0], [], **params).token == 1


def probabilities_after(cut: torch.Tensor) -> torch.Tensor:
    return torch.where(cut, FLAT_LOGITS, float("-inf")).softmax(0)


def test_top_k_keeps_the_k_best_and_their_ratios() -> None:
    expected = probabilities_after(torch.arange(VOCAB_SIZE) >= VOCAB_SIZE - 4)
    assert_distributed(draw_many(FLAT_LOGITS, top_k=4), expected)


def test_top_k_beyond_the_vocabulary_cuts_nothing() -> None:
    assert_distributed(draw_many(FLAT_LOGITS, top_k=50), FLAT_LOGITS.softmax(0))


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    logits = torch.tensor([1.0, 1.0, 1.0, -5.0, 2.0])
    assert draw_many(logits, top_k=2).gt(0).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float) -> None:
    probabilities = FLAT_LOGITS.softmax(0).flip(0)  # best first
    num_kept = int((probabilities.cumsum(0) < top_p).sum()) + 1
    expected = probabilities_after(torch.arange(VOCAB_SIZE) >= VOCAB_SIZE - num_kept)
    assert_distributed(draw_many(FLAT_LOGITS, top_p=top_p), expected)


def test_top_p_is_of_what_top_k_left() -> None:
    """The probabilities are those after top_k: of four equal tokens, top_p 0.5 leaves those that tie."""
    logits = torch.tensor([0.0, 0.5, 1.0, 4.0])
    assert draw_many(logits, top_k=3, top_p=0.9).gt(0).tolist() == [False, False, False, True]
    assert draw_many(logits, top_k=3, top_p=0.97).gt(0).tolist() == [False, False, True, True]


def test_top_p_over_a_flat_large_vocabulary_looks_beyond_its_shortlist() -> None:
    """With 5,000 nearly equal tokens half of them are needed to reach 0.5."""
    logits = torch.linspace(0, 1e-3, 5000)
    rows = [SamplingRow(SamplingParams(top_p=0.5, seed=i), [0], 1) for i in range(400)]
    tokens = torch.tensor([token.token for token in sample(logits.expand(400, -1), rows)])
    assert tokens.min() >= 2499
    assert tokens.max() > 4900
    assert len(tokens.unique()) > 350


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    probabilities = FLAT_LOGITS.softmax(0)
    expected = probabilities_after(probabilities >= 0.3 * probabilities.max())
    assert_distributed(draw_many(FLAT_LOGITS, min_p=0.3), expected)


def test_min_p_is_applied_after_the_temperature() -> None:
    scaled = (FLAT_LOGITS / 2.0).softmax(0)
    kept = scaled >= 0.3 * scaled.max()
    expected = torch.where(kept, FLAT_LOGITS / 2.0, float("-inf")).softmax(0)
    assert_distributed(draw_many(FLAT_LOGITS, min_p=0.3, temperature=2.0), expected)


def probabilities_by_counting(
    logits: torch.Tensor, prompt: list[int], output: list[int], **params: Any
) -> torch.Tensor:
    """Estimate the distribution of one position from many seeds."""
    rows = [SamplingRow(SamplingParams(seed=i, **params), prompt + output, len(prompt)) for i in range(NUM_DRAWS)]
    tokens = [token.token for token in sample(logits.expand(NUM_DRAWS, -1), rows)]
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[0])


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    """logit - frequency * count - presence * (count > 0), as OpenAI defines them."""
    prompt, output = [11, 11, 10], [9, 9, 9, 8]
    counts = probabilities_by_counting(FLAT_LOGITS, prompt, output, frequency_penalty=0.4, presence_penalty=0.3)
    expected = FLAT_LOGITS.clone()
    expected[9] -= 0.4 * 3 + 0.3
    expected[8] -= 0.4 + 0.3
    assert_distributed(counts, expected.softmax(0))


def test_the_repetition_penalty_counts_prompt_and_output() -> None:
    """Positive logits are divided, negative ones multiplied, once however often a token occurred (CTRL, 2019)."""
    counts = probabilities_by_counting(FLAT_LOGITS, [0, 11, 11], [1, 10], repetition_penalty=1.5)
    expected = FLAT_LOGITS.clone()
    expected[[10, 11]] /= 1.5
    expected[[0, 1]] *= 1.5
    assert_distributed(counts, expected.softmax(0))


def test_the_logit_bias_is_added_before_everything_else() -> None:
    counts = draw_many(FLAT_LOGITS, over="seed", logit_bias={0: 2.0, 11: -100.0})
    expected = FLAT_LOGITS.clone()
    expected[0] += 2.0
    expected[11] -= 100.0
    assert_distributed(counts, expected.softmax(0).where(torch.arange(VOCAB_SIZE) != 11, 0.0))
    assert choose(FLAT_LOGITS, [0], [], temperature=0.0, logit_bias={3: 100.0}).token == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_banned_until_min_tokens(temperature: float) -> None:
    """With min_tokens 3 the first three tokens cannot stop, the fourth can."""
    logits = torch.tensor([0.0, 0.0, 50.0, 40.0])
    params: dict[str, Any] = {"temperature": temperature, "min_tokens": 3, "stop_token_ids": (2, 3)}
    for num_output_tokens in range(3):
        assert choose(logits, [0, 0], [0] * num_output_tokens, **params).token in (0, 1)
    assert choose(logits, [0, 0], [0] * 3, **params).token == 2


def test_logprobs_are_of_the_raw_logits() -> None:
    """Temperature, bias and cuts move the choice, not the log-probabilities; the best come first."""
    logits = logits_of(VOCAB_SIZE)
    expected = logits.log_softmax(0)
    order = expected.argsort(descending=True)
    token = choose(logits, [0], [1], temperature=0.5, top_k=2, logit_bias={4: 100.0}, num_logprobs=3)
    assert token.token == 4
    assert token.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    assert [t for t, _ in token.top] == order[:3].tolist()
    assert [p for _, p in token.top] == pytest.approx(expected[order[:3]].tolist(), abs=1e-5)


def test_logprobs_only_when_asked() -> None:
    logits = logits_of(VOCAB_SIZE)
    assert choose(logits, [0], [], num_logprobs=0).top == ()
    assert choose(logits, [0], [], num_logprobs=0).logprob is not None
    assert choose(logits, [0], []).logprob is None


def test_scores_are_the_log_softmax_of_each_row() -> None:
    """More rows than are looked at together; the floor holds here, too."""
    logits = logits_of(100, VOCAB_SIZE)
    logits[7, 3] = float("-inf")
    token_ids = [i % logits.shape[1] for i in range(100)]
    token_ids[7] = 3
    scores = score(logits, token_ids, 2)
    assert [each.token for each in scores] == token_ids
    assert scores[7].logprob == -9999.0
    expected = logits.log_softmax(1)
    own = expected[torch.arange(100), torch.tensor(token_ids)].clamp(min=-9999.0)
    assert torch.allclose(torch.tensor([each.logprob for each in scores]), own, atol=1e-6)
    assert [[token for token, _ in each.top] for each in scores] == expected.topk(2).indices.tolist()
    assert score(logits, token_ids, 0)[0].top == ()


def test_logprobs_have_a_floor() -> None:
    """JSON has no infinity."""
    logits = torch.tensor([0.0, float("-inf"), 1.0])
    token = choose(logits, [0], [], num_logprobs=3)
    assert token.top[-1] == (1, MIN_LOGPROB)


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    """A draw from bfloat16 logits is the draw from the same numbers in float32."""
    logits = logits_of(500).bfloat16()
    for i in range(50):
        one = choose(logits, [0], [1] * i, temperature=1.3, top_p=0.9, num_logprobs=1)
        assert one == choose(logits.float(), [0], [1] * i, temperature=1.3, top_p=0.9, num_logprobs=1)


def masked(allowed: set[int], output: list[int], **params: Any) -> int:
    mask = np.isin(np.arange(VOCAB_SIZE), list(allowed))
    row = SamplingRow(SamplingParams(**params), [0, *output], 1, mask)
    return sample(logits_of(1, VOCAB_SIZE), [row])[0].token


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 2.0}, {"top_p": 0.01}, {"top_k": 1}])
def test_only_tokens_that_the_grammar_allows_are_chosen(params: dict[str, Any]) -> None:
    """Neither a bias nor a cut brings another one back."""
    logits = logits_of(1, VOCAB_SIZE)[0]
    worst = {int(token) for token in logits.argsort()[:3]}
    for seed in range(40):
        assert masked(worst, [], seed=seed, logit_bias={int(logits.argmax()): 100.0}, **params) in worst


def test_draws_under_a_grammar_follow_the_softmax_over_what_it_allows() -> None:
    mask = np.arange(VOCAB_SIZE) % 2 == 0
    rows = [SamplingRow(SamplingParams(seed=i), [0], 1, mask) for i in range(NUM_DRAWS)]
    tokens = [token.token for token in sample(FLAT_LOGITS.expand(NUM_DRAWS, -1), rows)]
    expected = FLAT_LOGITS.masked_fill(~torch.from_numpy(mask), float("-inf")).softmax(0)
    assert_distributed(torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE), expected)


def test_min_tokens_yields_to_a_grammar_that_is_complete() -> None:
    """A stop token stays banned as long as the grammar allows anything else."""
    for seed in range(20):
        assert masked({2, 7}, [], seed=seed, min_tokens=3, stop_token_ids=(2, 3)) == 7
        assert masked({2, 3}, [], seed=seed, min_tokens=3, stop_token_ids=(2, 3)) in {2, 3}
