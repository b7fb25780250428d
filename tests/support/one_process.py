"""What one process answers, in the plainest way: the oracle for answers that two pools make together.

The model and the sampler are the engine's; everything around them is written anew and naively, so that it shares no
path with the router: the whole text is decoded again after every token, and searched for every stop string.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from twinpool.cluster.config import EngineSpec
from twinpool.cluster.protocol.messages import SampledToken, SamplingParams
from twinpool.engine.model import load_engine
from twinpool.engine.sequence import ScheduledRow, Sequence

DIRECT = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass
class PlainAnswer:
    """One choice as it grows."""

    fields: dict[str, Any]
    sequence: Sequence
    tokens: list[SampledToken] = field(default_factory=list[SampledToken])
    text: str = ""
    finish_reason: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token for token in self.tokens]

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob or 0.0 for token in self.tokens) / len(self.tokens)


class OneProcess:
    def __init__(self, folder: Path, eos_id: int) -> None:
        self.engine = load_engine(folder, EngineSpec(dtype="float32", device="cpu", block_size=32, num_blocks=128))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos_id = eos_id

    def complete(self, prompt: str, requests: list[dict[str, Any]]) -> list[list[PlainAnswer]]:
        """Answer bodies of /v1/completions that all have this prompt; the choices of each in order."""
        ids: list[int] = self.tokenizer.encode(prompt).ids
        answers = [
            [self._begin(ids, fields, j) for j in range(fields.get("best_of", fields.get("n", 1)))]
            for fields in requests
        ]
        flat = [answer for choices in answers for answer in choices]
        for i, answer in enumerate(flat):
            answer.sequence.block_table.extend(range(2 * i, 2 * i + 2))
        while running := [answer for answer in flat if answer.finish_reason is None]:
            self._step(running)
        return [self._returned(fields, choices) for fields, choices in zip(requests, answers, strict=True)]

    def _begin(self, ids: list[int], fields: dict[str, Any], j: int) -> PlainAnswer:
        stop_token_ids = set(fields.get("stop_token_ids", ()))
        if not fields.get("ignore_eos"):
            stop_token_ids.add(self.eos_id)
        sampling = SamplingParams(
            **{name: fields[name] for name in DIRECT if name in fields},
            max_tokens=fields["max_tokens"],
            min_tokens=fields.get("min_tokens", 0),
            logit_bias={int(token): bias for token, bias in fields.get("logit_bias", {}).items()},
            stop_token_ids=tuple(stop_token_ids),
            seed=fields["seed"] + j,
            num_logprobs=fields.get("logprobs", 0),
        )
        return PlainAnswer(fields, Sequence("r", 1, list(ids), len(ids), sampling))

    def _step(self, running: list[PlainAnswer]) -> None:
        sequences = [answer.sequence for answer in running]
        rows = [ScheduledRow(s, s.num_computed_tokens, len(s.token_ids), samples=True) for s in sequences]
        for answer, row, token in zip(running, rows, self.engine.step(rows).sampled, strict=True):
            assert token is not None
            row.sequence.num_computed_tokens = row.end
            row.sequence.token_ids.append(token.token)
            answer.tokens.append(token)
            self._look_for_the_end(answer)

    def _look_for_the_end(self, answer: PlainAnswer) -> None:
        fields, sampling, ids = answer.fields, answer.sequence.sampling, answer.token_ids
        is_stop_token = ids[-1] in sampling.stop_token_ids
        keeps_stop = bool(fields.get("include_stop_str_in_output"))
        answer.text = self._text(ids[:-1] if is_stop_token and not keeps_stop else ids, fields)
        searched_from = len(self._text(ids[: sampling.min_tokens], fields))
        stops = [fields["stop"]] if isinstance(fields.get("stop"), str) else fields.get("stop", [])
        found = [
            (answer.text.find(s, searched_from) + len(s), -len(s)) for s in stops if s in answer.text[searched_from:]
        ]
        if found:
            end, negative_length = min(found)
            answer.text = answer.text[: end if keeps_stop else end + negative_length]
        if found or is_stop_token:
            answer.finish_reason = "stop"
        elif len(ids) == sampling.max_tokens:
            answer.finish_reason = "length"

    def _text(self, ids: list[int], fields: dict[str, Any]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=fields.get("skip_special_tokens", True))

    def _returned(self, fields: dict[str, Any], choices: list[PlainAnswer]) -> list[PlainAnswer]:
        if "best_of" not in fields:
            return choices
        return sorted(choices, key=lambda answer: -answer.mean_logprob)[: fields.get("n", 1)]
