"""Structured output by the real model through both pools: it parses, streamed or not, and equals one process's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster
from twinpool.cluster.config import EngineSpec
from twinpool.cluster.protocol.messages import Grammar, SamplingParams
from twinpool.engine.model import load_engine
from twinpool.engine.sequence import ScheduledRow, Sequence
from twinpool.engine.stopping import finish_reason

ASK = [{"role": "user", "content": "Tell me about a person. Answer briefly."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall"]}, "maxItems": 1},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
CHOICES = ["red", "green", 'blue "ish"']


def ask(cluster: LiveCluster, **fields: Any) -> tuple[str, str]:
    """Ask streamed and whole; return the text and finish reason, which must agree."""
    body = {"messages": ASK, "max_tokens": 120, "seed": 7, **fields}
    whole = cluster.client.post("/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    text, reasons = "", list[str]()
    with cluster.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (chunk,) = json.loads(line.removeprefix("data: "))["choices"]
                text += chunk["delta"].get("content") or ""
                reasons += [chunk["finish_reason"]] if chunk["finish_reason"] else []
    assert (text, reasons) == (choice["message"]["content"], [choice["finish_reason"]])
    return text, reasons[0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_structures_are_kept(chat_cluster: LiveCluster, temperature: float) -> None:
    text, reason = ask(chat_cluster, temperature=temperature, response_format=PERSON_FORMAT)
    assert reason == "stop"
    person = json.loads(text)
    assert set(person) == set(PERSON["properties"])
    assert 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"kind", "tall"}
    text, reason = ask(chat_cluster, temperature=temperature, guided_choice=CHOICES)
    assert reason == "stop"
    assert text in CHOICES
    text, reason = ask(chat_cluster, temperature=temperature, guided_regex=r"[0-9]{3}-[0-9]{4}", ignore_eos=True)
    assert reason == "stop"
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", text)


def test_json_objects_parse_when_they_ended(chat_cluster: LiveCluster) -> None:
    ended = 0
    for seed in range(2):
        fields = {"seed": seed, "temperature": 1, "max_tokens": 32, "logit_bias": {"109": 8}}  # the token is "}"
        text, reason = ask(chat_cluster, **fields, response_format={"type": "json_object"})
        if reason == "stop":
            ended += 1
            assert isinstance(json.loads(text), dict)
    assert ended


def test_a_structure_that_is_cut_off_says_so(chat_cluster: LiveCluster) -> None:
    text, reason = ask(chat_cluster, max_tokens=3, temperature=0, response_format=PERSON_FORMAT)
    assert reason == "length"
    assert text.startswith("{")


def test_completions_know_structures_too(chat_cluster: LiveCluster) -> None:
    answer = chat_cluster.complete("The sky is", max_tokens=20, guided_choice=CHOICES, n=3, seed=1)
    assert {choice["text"] for choice in answer["choices"]} <= set(CHOICES)


def test_two_pools_answer_as_one_process(chat_cluster: LiveCluster, smollm2: Path) -> None:
    """The first token under a grammar is chosen on one worker, the others on another one."""
    prompt = [504, 3575, 282, 4649, 314]
    engine = load_engine(smollm2, EngineSpec(dtype="float32", device="cpu", num_blocks=16))
    grammar = Grammar(kind="json_schema", source=json.dumps(PERSON, separators=(",", ":")))
    params = SamplingParams(max_tokens=80, seed=1, grammar=grammar, stop_token_ids=(2,), presence_penalty=0.5)
    sequence = Sequence("one", 1, list(prompt), len(prompt), params, block_table=list(range(8)))
    while True:
        row = ScheduledRow(sequence, sequence.num_computed_tokens, len(sequence.token_ids), samples=True)
        (token,) = engine.step([row]).sampled
        assert token is not None
        sequence.num_computed_tokens = row.end
        sequence.token_ids.append(token.token)
        if finish_reason(token.token, sequence.num_output_tokens, params):
            break
    fields = {"guided_json": PERSON, "max_tokens": 80, "seed": 1, "presence_penalty": 0.5}
    answer = chat_cluster.complete(prompt, return_token_ids=True, **fields)["choices"][0]
    assert answer["token_ids"] == sequence.token_ids[len(prompt) :]


@pytest.mark.slow
def test_an_answer_goes_on_within_its_grammar_when_its_worker_dies(tiny_llama: Path) -> None:
    """The next process knows the grammar and the tokens so far, and nothing else."""
    schema = {"type": "array", "items": {"enum": ["ab", "ba"]}, "minItems": 100, "maxItems": 100}
    fields = {"max_tokens": 2000, "seed": 3, "guided_json": schema}
    engine = {"dtype": "float32", "num_blocks": 256}
    router = {"no_worker_grace_s": 120.0}  # as long as a process takes to start
    spec = {"router": router, "prompt": {"engine": engine}, "completion": {"engine": engine}}
    with LiveCluster(tiny_llama, spec) as cluster:
        expected = cluster.complete("x", **fields)["choices"][0]["text"]
        assert len(json.loads(expected)) == 100
        chunks = cluster.stream("x", **fields, timing=True)
        texts = [next(chunks)["choices"][0]["text"] for _ in range(20)]
        cluster.kill("completion-0")
        cluster.start("completion-0")
        rest = list(chunks)
        assert rest[-1]["timing"]["num_attempts"] > 1
        texts += [chunk["choices"][0]["text"] for chunk in rest if chunk["choices"]]
        assert "".join(texts) == expected
