"""The fake engine must notice any wrong byte, and nothing else."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from twinpool.cluster.protocol.messages import SampledToken, SamplingParams
from twinpool.engine.fake import FAKE_LAYOUT, ROW_BYTES, FakeEngine, expected_scores, expected_tokens
from twinpool.engine.sequence import ScheduledRow, Sequence

VOCAB = 2**31 - 1  # large, so that two hashes never give one token by chance
PROMPT = [5, 250, 3, 3, 7, 1, 0, 9, 200, 31, 4]
ALL_LAYERS = range(FAKE_LAYOUT.num_layers)


def sequence_on(engine: FakeEngine, prompt: list[int], seed: int = 0) -> Sequence:
    """Give a sequence every block of `engine`, in an order that is not the natural one."""
    table = list(range(engine.num_blocks))
    random.Random(1).shuffle(table)
    return Sequence("r", 1, list(prompt), len(prompt), SamplingParams(seed=seed), block_table=table)


def generate(engine: FakeEngine, sequence: Sequence, num_tokens: int, chunk: int = 10_000) -> list[int]:
    """Run a sequence until it has `num_tokens` outputs, at most `chunk` tokens a step."""
    while sequence.num_output_tokens < num_tokens:
        length = len(sequence.token_ids)
        end = min(length, sequence.num_computed_tokens + chunk)
        sampled = engine.step(
            [ScheduledRow(sequence, sequence.num_computed_tokens, end, samples=end == length)]
        ).sampled[0]
        sequence.num_computed_tokens = end
        assert (sampled is None) == (end < length)
        if sampled is not None:
            sequence.token_ids.append(sampled.token)
    return sequence.token_ids[sequence.num_prompt_tokens :]


@given(
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=30),
    block_size=st.integers(1, 9),
    chunk=st.integers(1, 12),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=60, deadline=None)
def test_blocks_and_chunks_do_not_change_the_tokens(prompt: list[int], block_size: int, chunk: int, seed: int) -> None:
    """The tokens are those of the oracle, for any block size, block order and chunking."""
    engine = FakeEngine(-(-(len(prompt) + 5) // block_size), block_size)
    answer = generate(engine, sequence_on(engine, prompt, seed), 5, chunk)
    assert answer == expected_tokens(prompt, 5, seed=seed)


def test_prompt_seed_and_vocabulary_matter() -> None:
    base = expected_tokens(PROMPT, 4, VOCAB)
    assert expected_tokens(PROMPT, 4, VOCAB) == base
    assert expected_tokens(PROMPT, 4, VOCAB, seed=1) != base
    assert expected_tokens([*PROMPT[:-1], 5], 4, VOCAB) != base
    assert expected_tokens([6, *PROMPT[1:]], 4, VOCAB) != base
    assert all(token < 7 for token in expected_tokens(PROMPT, 20, 7))


def test_batch_mates_do_not_change_the_tokens() -> None:
    """Two sequences in one step answer as each does alone."""
    engine = FakeEngine(8, 4, VOCAB)
    a = Sequence("a", 1, [1, 2, 3], 3, SamplingParams(), block_table=[1, 6])
    b = Sequence("b", 1, [9, 8, 7, 6, 5], 5, SamplingParams(seed=3), block_table=[0, 4])
    rows = [ScheduledRow(a, 0, 3, True), ScheduledRow(b, 0, 5, True)]
    tokens = [sampled.token for sampled in engine.step(rows).sampled if sampled is not None]
    assert tokens == [*expected_tokens([1, 2, 3], 1, VOCAB), *expected_tokens([9, 8, 7, 6, 5], 1, VOCAB, seed=3)]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_scores_are_those_of_the_oracle_whatever_the_chunks(chunk: int) -> None:
    """They depend on the prompt alone: not on chunks, seed, or outputs of an earlier attempt."""
    engine = FakeEngine(4, 4, VOCAB)
    sequence = sequence_on(engine, PROMPT, seed=9)
    sequence.sampling = SamplingParams(scores_prompt=True, num_logprobs=2, seed=9)
    sequence.token_ids += [1, 2]
    scores: list[SampledToken] = []
    for start in range(0, len(PROMPT) + 2, chunk):
        row = ScheduledRow(sequence, start, min(start + chunk, len(PROMPT) + 2), samples=False)
        scores += engine.step([row]).scores[0]
    assert scores == expected_scores(PROMPT, 2, VOCAB)
    assert [score.token for score in scores] == PROMPT[1:]
    others = expected_scores([6, *PROMPT[1:]], 2, VOCAB)
    assert not set(scores) & set(others), "the first token matters to every score"
    assert expected_scores([5]) == []


def test_any_flipped_byte_changes_the_next_token() -> None:
    """Sampled over layers, keys and values, tokens and bytes."""
    whole = range(len(PROMPT))
    right = expected_tokens(PROMPT, 2, VOCAB)
    source = FakeEngine(4, 4, VOCAB)
    sequence = sequence_on(source, PROMPT)
    assert generate(source, sequence, 1) == right[:1]
    payload = source.gather(sequence.block_table, ALL_LAYERS, whole)
    assert payload.nbytes == FAKE_LAYOUT.frame_bytes(len(ALL_LAYERS), len(whole))
    places = [*random.Random(3).sample(range(payload.nbytes), 150), 0, payload.nbytes - 1]
    for place in places:
        damaged = bytearray(payload)
        damaged[place] ^= 1 << (place % 8)
        target = FakeEngine(4, 4, VOCAB)
        moved = Sequence("r", 1, [*PROMPT, right[0]], len(PROMPT), SamplingParams(), 0, len(PROMPT), [3, 0, 2, 1])
        target.scatter(moved.block_table, ALL_LAYERS, whole, memoryview(bytes(damaged)))
        assert generate(target, moved, 2) != right, f"byte {place} does not matter"


@pytest.mark.parametrize("swap", ["layers", "keys and values", "tokens"])
def test_rows_at_each_others_place_change_the_next_token(swap: str) -> None:
    """All bytes are right, but two layers, K and V, or two tokens are swapped."""
    right = expected_tokens(PROMPT, 2, VOCAB)
    source = FakeEngine(4, 4, VOCAB)
    sequence = sequence_on(source, PROMPT)
    generate(source, sequence, 1)
    whole = range(len(PROMPT))
    shape = (len(ALL_LAYERS), 2, len(PROMPT), ROW_BYTES)
    rows = np.frombuffer(source.gather(sequence.block_table, ALL_LAYERS, whole), np.uint8).reshape(shape)
    order = {
        "layers": rows[[0, 2, 1]],
        "keys and values": rows[:, ::-1],
        "tokens": rows[:, :, [0, 2, 1, *range(3, 11)]],
    }
    target = FakeEngine(4, 4, VOCAB)
    moved = Sequence("r", 1, [*PROMPT, right[0]], len(PROMPT), SamplingParams(), 0, len(PROMPT), [3, 0, 2, 1])
    target.scatter(moved.block_table, ALL_LAYERS, whole, memoryview(order[swap].tobytes()))
    assert generate(target, moved, 2) != right


@pytest.mark.parametrize(("layers", "tokens"), [(range(3), range(11)), (range(1, 2), range(3, 9))])
def test_what_is_gathered_is_what_scatter_writes(layers: range, tokens: range) -> None:
    """Between caches of different block sizes, and nothing outside the range is touched."""
    source, target = FakeEngine(4, 4, VOCAB), FakeEngine(3, 5, VOCAB)
    sequence = sequence_on(source, PROMPT)
    generate(source, sequence, 1)
    table = [2, 0, 1]
    payload = source.gather(sequence.block_table, layers, tokens)
    target.scatter(table, layers, tokens, payload)
    assert target.gather(table, layers, tokens) == payload
    for token in set(range(len(PROMPT))) - set(tokens):
        assert not any(target.gather(table, ALL_LAYERS, range(token, token + 1)))
    for layer in set(ALL_LAYERS) - set(layers):
        assert not any(target.gather(table, range(layer, layer + 1), range(len(PROMPT))))


def test_layers_are_announced_in_order_and_only_once_written() -> None:
    engine = FakeEngine(4, 4, VOCAB)
    sequence = sequence_on(engine, PROMPT)
    seen: list[int] = []

    def written(layer: int) -> None:
        seen.append(layer)
        rows = engine.gather(sequence.block_table, ALL_LAYERS, range(len(PROMPT)))
        layer_bytes = FAKE_LAYOUT.frame_bytes(1, len(PROMPT))
        present = [any(rows[n * layer_bytes : (n + 1) * layer_bytes]) for n in ALL_LAYERS]
        assert present == [n <= layer for n in ALL_LAYERS]

    engine.step([ScheduledRow(sequence, 0, len(PROMPT), True)], written)
    assert seen == list(ALL_LAYERS)


def test_a_step_takes_its_time() -> None:
    engine = FakeEngine(4, 4, seconds_per_row=0.002)
    started_s = time.monotonic()
    engine.step([ScheduledRow(sequence_on(engine, PROMPT), 0, len(PROMPT), True)])
    assert time.monotonic() - started_s >= 0.002


def test_identity_names_what_must_agree() -> None:
    """Engines of one vocabulary fit together, whatever their blocks; of two they do not."""
    assert FakeEngine(4, 4).identity == FakeEngine(9, 16).identity
    assert FakeEngine(4, 4).identity != FakeEngine(4, 4, vocab_size=99).identity


def test_poison_changes_the_answer_of_whoever_reads_the_block_and_of_nobody_else() -> None:
    engine = FakeEngine(4, 4, VOCAB)
    sequence = sequence_on(engine, PROMPT)
    generate(engine, sequence, 2)
    engine.poison([sequence.block_table[3]])  # not begun: 12 tokens are computed, three blocks full
    assert generate(engine, sequence, 3) == expected_tokens(PROMPT, 3, VOCAB)
    engine.poison([sequence.block_table[1]])
    assert generate(engine, sequence, 4)[:3] == expected_tokens(PROMPT, 3, VOCAB)
    assert generate(engine, sequence, 4)[3] != expected_tokens(PROMPT, 4, VOCAB)[3]
