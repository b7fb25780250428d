"""Prompts that come back, with and without log-probabilities: in the text, in the lists, in a stream's lines."""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from twinpool.cluster.protocol.messages import SampledToken, SamplingParams
from twinpool.router.generation import GenerationFailed, GenerationRequest, PromptScored
from twinpool.router.openai.echo import Echo
from twinpool.router.openai.prepare import Choice
from twinpool.router.openai.tokenizer import ChatTokenizer

COMPLETIONS = "/v1/completions"
PROMPT = "a€ héllo w<|im_start|>!"
MAX_LINE_BYTES = 128 * 1024

Say = Callable[..., list[Any]]


def scored(request: GenerationRequest, group: int = 64, top: Sequence[int] = (5, 0)) -> list[PromptScored]:
    """Return the scores of a prompt as the dispatching side sends them: token i has -i / 8."""
    ids = request.token_ids
    alternatives = tuple((token, -0.25 * i) for i, token in enumerate(top))
    scores = [SampledToken(token=ids[i], logprob=-i / 8, top=alternatives) for i in range(1, len(ids))]
    return [PromptScored(1 + i, tuple(scores[i : i + group])) for i in range(0, len(scores), group)]


@pytest.fixture
def scoring(backend: Any, say: Say) -> Any:
    """Score the prompt where it is asked for, then answer "hé"."""
    backend.script = lambda request: [*(scored(request) if request.sampling.scores_prompt else []), *say("hé")]
    return backend


def joined(chunks: list[Any], num_choices: int = 1) -> list[Any]:
    """Return the choices that a stream's chunks make up."""
    choices: list[Any] = []
    for index in range(num_choices):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        logprobs = {key: [x for each in own for x in each["logprobs"][key] or ()] for key in own[0]["logprobs"]}
        text = "".join(each["text"] for each in own)
        choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": own[-1]["finish_reason"]})
    return choices


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_the_lists_hold_prompt_and_answer_and_the_stream_joins_to_the_whole(
    call: Any, scoring: Any, events_of: Any, tokenizer: ChatTokenizer, form: str, max_tokens: int
) -> None:
    """As many entries as tokens, the first null; max_tokens 0 scores and generates nothing that shows."""
    ids = tokenizer.encode(PROMPT)
    prompt = {"text": PROMPT, "texts": [PROMPT, "b"], "ids": ids, "lists of ids": [ids, [7]]}[form]
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    body = call("POST", COMPLETIONS, json=fields).json()
    choice = body["choices"][0]
    shown = [] if max_tokens == 0 else tokenizer.encode("hé")
    assert choice["text"] == PROMPT + ("hé" if shown else "")
    logprobs = choice["logprobs"]
    tokens = [*ids, *shown]
    assert {len(entries) for entries in logprobs.values()} == {len(tokens)}
    assert logprobs["token_logprobs"] == [None, *(-i / 8 for i in range(1, len(ids))), *(-0.5 for _ in shown)]
    assert logprobs["top_logprobs"][:2] == [None, {tokenizer.decode([5]): 0.0, tokenizer.decode([0]): -0.25}]
    assert logprobs["text_offset"] == [len(tokenizer.decode(tokens[:i]).rstrip("\ufffd")) for i in range(len(tokens))]
    assert choice["finish_reason"] == ("stop" if shown else "length")
    assert body["usage"]["completion_tokens"] == len(shown) * len(body["choices"])
    assert [r.sampling.max_tokens for r in scoring.requests] == [max(max_tokens, 1)] * len(body["choices"])
    chunks = events_of(call("POST", COMPLETIONS, json=fields | {"stream": True}).text)
    assert joined(chunks, len(body["choices"])) == body["choices"]


def test_a_prompt_of_one_token_has_no_score(call: Any, scoring: Any) -> None:
    body = call("POST", COMPLETIONS, json={"prompt": "h", "echo": True, "logprobs": 1, "max_tokens": 0}).json()
    logprobs = {"tokens": ["h"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    assert body["choices"] == [{"index": 0, "text": "h", "logprobs": logprobs, "finish_reason": "length"}]


def test_logprobs_of_zero_alternatives(call: Any, scoring: Any) -> None:
    body = call("POST", COMPLETIONS, json={"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0}).json()
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.125]


def test_only_echo_with_logprobs_asks_for_scores(call: Any, scoring: Any) -> None:
    for fields in ({"echo": True}, {"logprobs": 3}, {"echo": False, "logprobs": 0}):
        assert call("POST", COMPLETIONS, json={"prompt": "ab"} | fields).status_code == 200
    assert not any(request.sampling.scores_prompt for request in scoring.requests)


def test_nothing_that_would_show_ends_a_request_for_scores_alone(call: Any, scoring: Any) -> None:
    """The token that comes with the scores may be a stop token, or complete a stop string; nobody sees it."""
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0, "stop": "h", "return_token_ids": True}
    body = call("POST", COMPLETIONS, json=fields | {"timing": True}).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("ab", "length", [])
    assert body["timing"]["num_output_tokens"] == 0


def test_a_failure_before_any_score_has_its_status(call: Any, scoring: Any) -> None:
    scoring.script = lambda request: [GenerationFailed("worker_failed", "It died.")]
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0, "stream": True}
    assert call("POST", COMPLETIONS, json=fields).status_code == 502


def lines_of(text: str) -> list[bytes]:
    return [line.encode() for line in text.split("\n")]


@pytest.mark.parametrize("character", ["a", "\x01", "😀"])
def test_no_line_of_a_stream_is_too_long(
    call: Any, scoring: Any, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    """Regression: some readers refuse lines above 128 KiB; an echo was one line, however long the prompt."""
    prompt = character * 100_000
    monkeypatch.setattr(scoring, "max_model_len", None)
    monkeypatch.setattr(tokenizer, "context_length", None)
    text = call("POST", COMPLETIONS, json={"prompt": prompt, "echo": True, "max_tokens": 0, "stream": True}).text
    assert max(map(len, lines_of(text))) <= MAX_LINE_BYTES
    chunks = [json.loads(line[6:]) for line in lines_of(text) if line.startswith(b"data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == prompt


def test_no_line_with_scores_is_too_long(call: Any, scoring: Any, say: Say, events_of: Any) -> None:
    """Text and lists are cut at the same tokens, so each chunk's lists are about its own text."""
    scoring.script = lambda request: [*scored(request, top=range(180, 200)), *say("h")]
    fields = {"prompt": "€uro " * 70, "echo": True, "logprobs": 20, "max_tokens": 0, "stream": True}
    text = call("POST", COMPLETIONS, json=fields).text
    assert max(map(len, lines_of(text))) <= MAX_LINE_BYTES
    at = 0
    for chunk in events_of(text):
        choice = chunk["choices"][0]
        offsets = choice["logprobs"]["text_offset"]
        assert len(offsets) <= 16
        assert all(at <= offset <= at + len(choice["text"]) for offset in offsets)
        at += len(choice["text"])
    assert at == 5 * 70


class SentencePieces:
    """A tokenizer that begins with <s> and a space that are not in the text, and writes ﬁ as fi."""

    def __init__(self) -> None:
        self.names = ["<s>", " A", " fi", "n"]

    def token_bytes(self, token: int) -> bytes:
        return self.names[token].encode()

    def is_special(self, token: int) -> bool:
        return token == 0


def test_tokens_that_are_not_quite_the_text_keep_their_offsets_within_it() -> None:
    """What the tokenizer adds has no width; what it rewrites may shift an offset, and never the text."""
    text, ids = "A ﬁn", (0, 1, 2, 3)
    request = GenerationRequest("r", ids, SamplingParams(scores_prompt=True, num_logprobs=0))
    echo = Echo(Choice(0, request, text), cast(ChatTokenizer, SentencePieces()))
    pieces = [*echo.push([SampledToken(token=token, logprob=-1.0) for token in ids[1:]]), *echo.rest()]
    assert "".join(piece.text for piece in pieces) == text
    assert [detail.text_offset for piece in pieces for detail in piece.details] == [0, 0, 1, 4]
    assert echo.rest() == []


def test_more_scores_than_the_router_can_hold_are_refused(call: Any, scoring: Any) -> None:
    """A million is the bound, alternatives included; an answer of many is encoded beside the loop."""
    fields = {"prompt": [[5] * 500] * 128, "echo": True, "max_tokens": 0}
    response = call("POST", COMPLETIONS, json=fields | {"logprobs": 16})
    assert response.status_code == 400
    assert (response.json()["error"]["param"], scoring.requests) == ("logprobs", [])
    body = call("POST", COMPLETIONS, json=fields | {"prompt": [[5] * 500] * 20, "logprobs": 1}).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [500] * 20
