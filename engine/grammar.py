"""Grammars: which tokens may come next, so that the whole output matches a JSON schema, a regex or a Lark grammar.

The state after some output is a function of the grammar and the output's tokens alone. So nothing but these two crosses
the split: each worker, and each later attempt, brings a matcher of its own to the same state. The router compiles every
grammar first, under the same limits, so that workers get none that is wrong or too large. Knows no torch.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from ..cluster.protocol.errors import ConfigError, TwinpoolError
from ..cluster.protocol.messages import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Mask = NDArray[np.bool_]

MAX_COMPILED = 32  # grammars that a process keeps
MAX_STATES = 20_000  # of one grammar's lexer, over all outputs: about 10 MB when they are used up (measured)
# Within these limits a step takes some milliseconds, and a compilation with the first steps less than 0.1 s (measured).
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 50_000, "verbose_errors": False}
# Between JSON's tokens: nothing, a space, or a new line with its indentation. More would let a model idle there.
JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_pattern": r"(\n {0,32}| )?",
    "lenient": False,
    "coerce_one_of": False,
}
MAX_REASON_CHARACTERS = 200


class GrammarError(TwinpoolError):
    """A grammar that is wrong, too large, or at its end without a way to end. The message is one short line."""


class Grammars:
    """The grammars of one tokenizer, compiled; at most `max_compiled` are kept. Safe to use from several threads."""

    def __init__(self, tokenizer: LLTokenizer, max_compiled: int = MAX_COMPILED, max_states: int = MAX_STATES) -> None:
        self._tokenizer = tokenizer
        self._limits = LLParserLimits(**LIMITS, max_lexer_states=max_states)
        self._max_compiled = max_compiled
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def load(model_folder: Path) -> "Grammars":
        """Read the folder's tokenizer.json. Raises ConfigError."""
        path = model_folder / "tokenizer.json"
        try:
            return Grammars(LLTokenizer(str(path)))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} cannot be used for grammars: {error}") from error

    def __len__(self) -> int:
        return len(self._compiled)

    def has(self, grammar: Grammar) -> bool:
        """True when it is compiled already."""
        return grammar in self._compiled

    def matcher(self, grammar: Grammar) -> "GrammarMatcher":
        """Return a matcher at the beginning of the output. Raises GrammarError."""
        return GrammarMatcher(self, grammar)

    def begin(self, grammar: Grammar) -> LLMatcher:
        """Return the library's own matcher in its first state. Raises GrammarError."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self.compile(grammar)
            with self._lock:
                self._compiled[grammar] = compiled
                while len(self._compiled) > self._max_compiled:
                    self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile anew, and try two steps, for some limits are reached only there. Raises GrammarError."""
        matcher = LLMatcher(self._tokenizer, _to_library(grammar), log_level=0, limits=self._limits)
        _raise_error(matcher)
        trial = matcher.deep_copy()
        first = np.flatnonzero(self.mask(trial))
        if len(first):
            trial.consume_token(int(first[0]))
            self.mask(trial)
        elif not trial.is_accepting():
            raise GrammarError("nothing can match it")
        return matcher

    def mask(self, matcher: LLMatcher) -> Mask:
        """Return `[vocab]`: True for the tokens that may come next, none of which ends the output."""
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        _raise_error(matcher)
        mask = np.unpackbits(packed, bitorder="little", count=self._tokenizer.vocab_size).view(np.bool_)
        mask[self._tokenizer.eos_tokens] = False
        return mask


class GrammarMatcher:
    """How far the output of one sequence has come in its grammar."""

    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._matcher = grammars.begin(grammar)
        self._num_consumed = 0

    def allowed(self, output: Sequence[int], end_ids: Collection[int], num_tokens: int | None = None) -> Mask:
        """Return `[num_tokens]`: those that may follow `output`; `end_ids` end it, where the grammar may end.

        `output` only grows between calls. Raises GrammarError.
        """
        try:
            mask = self._advance(output)
        except GrammarError:
            # What the library remembers of other outputs counts towards its limits; alone this one may be within.
            self._matcher, self._num_consumed = self._grammars.compile(self._grammar), 0
            mask = self._advance(output)
        if num_tokens is not None:  # a model's embedding may have more rows than its tokenizer has tokens, or fewer
            mask = np.pad(mask[:num_tokens], (0, max(0, num_tokens - len(mask))))
        if self._matcher.is_accepting():
            mask[[token for token in end_ids if token < len(mask)]] = True
        if not mask.any():
            raise GrammarError("the grammar leaves no token that could come next")
        return mask

    def _advance(self, output: Sequence[int]) -> Mask:
        new = list(output[self._num_consumed :])
        if new and not self._matcher.consume_tokens(new):
            _raise_error(self._matcher)
            raise GrammarError("the output so far does not match the grammar")
        self._num_consumed = len(output)
        return self._grammars.mask(self._matcher)


def _to_library(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.source)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.source, overrides=JSON_OPTIONS)
    except ValueError as error:
        raise GrammarError(_in_one_line(str(error))) from error


def _raise_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_in_one_line(matcher.get_error()))


def _in_one_line(reason: str) -> str:
    """Return what is wrong, without the excerpts of the source that the library shows around it."""
    lines = reason.strip().splitlines() or ["no reason given"]
    last = [line for line in lines if line.startswith("error: ")]
    return (last[-1].removeprefix("error: ") if last else lines[0])[:MAX_REASON_CHARACTERS]


def json_source(schema: Any) -> str:
    """Return the text of a schema as `Grammar.source` wants it: as short as JSON can be."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
