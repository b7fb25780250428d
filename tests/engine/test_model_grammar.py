"""ModelEngine under grammars: where it goes on from does not matter, and a grammar that breaks harms nobody else."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from twinpool.cluster.config import EngineSpec
from twinpool.cluster.protocol.messages import Grammar, SamplingParams
from twinpool.engine.grammar import GrammarError
from twinpool.engine.model import ModelEngine, load_engine
from twinpool.engine.sequence import ScheduledRow, Sequence, StepOutput
from twinpool.engine.stopping import finish_reason

EOS = 2
FIRST_BYTE_TOKEN = 4  # tokens of the tiny models are single bytes, in the order of the byte alphabet
JSON = Grammar(
    kind="json_schema",
    source='{"type":"object","properties":{"a":{"enum":["x","yy"]}},"required":["a"],"additionalProperties":false}',
)
PHONE = Grammar(kind="regex", source="[0-9]{3}-[0-9]{4}")


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> ModelEngine:
    return load_engine(tiny_llama, EngineSpec(dtype="float32", device="cpu", block_size=16, num_blocks=64))


@pytest.fixture(scope="module")
def decode(tiny_llama: Path) -> Callable[[list[int]], str]:
    from twinpool.router.openai.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(tiny_llama)
    return lambda ids: tokenizer.decode([token for token in ids if token != EOS])


def sequence_of(grammar: Grammar | None, block: int, outputs: tuple[int, ...] = (), **params: object) -> Sequence:
    fields = {"max_tokens": 80, "stop_token_ids": (EOS,), "grammar": grammar, **params}
    prompt = list(range(10, 30))
    table = list(range(block, block + 8))
    return Sequence(str(block), 1, [*prompt, *outputs], 20, SamplingParams.model_validate(fields), block_table=table)


def advance(engine: ModelEngine, sequences: list[Sequence]) -> StepOutput:
    rows = [ScheduledRow(s, s.num_computed_tokens, len(s.token_ids), samples=True) for s in sequences]
    output = engine.step(rows)
    for i, (row, token) in enumerate(zip(rows, output.sampled, strict=True)):
        if i not in output.failures:
            assert token is not None
            row.sequence.num_computed_tokens = row.end
            row.sequence.token_ids.append(token.token)
    return output


def run(engine: ModelEngine, sequence: Sequence) -> list[int]:
    while True:
        advance(engine, [sequence])
        if finish_reason(sequence.token_ids[-1], sequence.num_output_tokens, sequence.sampling):
            return sequence.token_ids[sequence.num_prompt_tokens :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("grammar", [JSON, PHONE])
def test_the_output_matches_and_goes_on_from_any_token_alike(
    engine: ModelEngine, decode: Callable[[list[int]], str], grammar: Grammar, temperature: float
) -> None:
    """Another worker or a later attempt has nothing but the tokens so far."""
    whole = run(engine, sequence_of(grammar, 0, temperature=temperature, seed=5))
    assert whole[-1] == EOS
    text = decode(whole)
    if grammar is PHONE:
        assert re.fullmatch("[0-9]{3}-[0-9]{4}", text)
    else:
        assert json.loads(text)["a"] in ("x", "yy")
    for i in range(1, len(whole)):
        resumed = sequence_of(grammar, 8, outputs=tuple(whole[:i]), temperature=temperature, seed=5)
        assert run(engine, resumed) == whole


def test_neither_min_tokens_nor_ignored_eos_keep_a_complete_grammar_open(engine: ModelEngine) -> None:
    grammar = Grammar(kind="regex", source="abc")
    assert run(engine, sequence_of(grammar, 0, min_tokens=40))[-1] == EOS
    assert len(run(engine, sequence_of(grammar, 0, min_tokens=40))) == 4


def test_a_grammar_that_breaks_fails_its_row_and_no_other(engine: ModelEngine) -> None:
    """Output that no grammar of ours can have made stands for an error of the library."""
    broken = sequence_of(PHONE, 0, outputs=(FIRST_BYTE_TOKEN,), temperature=0.0)
    mates = [sequence_of(JSON, 8, temperature=0.0), sequence_of(None, 16, temperature=0.0)]
    alone = [sequence_of(JSON, 24, temperature=0.0), sequence_of(None, 32, temperature=0.0)]
    output = advance(engine, [mates[0], broken, mates[1]])
    assert list(output.failures) == [1]
    assert "grammar" in output.failures[1]
    advance(engine, alone)
    assert [s.token_ids for s in mates] == [s.token_ids for s in alone]
    rows = [ScheduledRow(s, 0, 1, samples=True) for s in (mates[0], broken, mates[1])]
    kept, rest = output.without_failures(rows)
    assert [row.sequence for row in kept] == mates
    assert len(rest.sampled) == len(rest.scores) == 2


def test_a_wrong_grammar_fails_its_row(engine: ModelEngine) -> None:
    """The router refuses it before; a worker must live all the same."""
    output = advance(engine, [sequence_of(Grammar(kind="regex", source="a("), 0)])
    assert "unclosed group" in output.failures[0]


def test_a_mask_has_the_width_of_the_logits(engine: ModelEngine) -> None:
    assert engine.grammars is not None
    for width in (100, 260, 300):
        mask = engine.grammars.matcher(Grammar(kind="regex", source="(.|\n)*")).allowed([], [EOS], width)
        assert mask.shape == (width,)
        assert not mask[260:].any()
    with pytest.raises(GrammarError, match="no token"):
        engine.grammars.matcher(PHONE).allowed([], [EOS], FIRST_BYTE_TOKEN)
