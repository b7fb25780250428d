"""The contract of both completions endpoints: what every field takes and refuses, asked of the real model.

All rows are sent at once and looked at one by one; after all of them the cluster must still answer.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from both_modes import Json, ask_both, assert_agree
from live_cluster import LiveCluster

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
VOCABULARY, CONTEXT, EOS = 49152, 8192, 2
MAX_BODY_BYTES = 32 * 1024 * 1024
JSON_TYPE = {"content-type": "application/json"}
USER = {"role": "user", "content": "Say hi."}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@dataclass(frozen=True)
class Refused:
    """A body that must be refused; `fields` change a good one, bytes are sent as they are."""

    path: str
    fields: Json | bytes
    param: str | None
    code: str = "invalid_value"
    status: int = 400

    def __str__(self) -> str:
        return f"{self.path} {str(self.fields)[:60]}"


def completions(param: str, code: str, *values: Any, **others: Any) -> list[Refused]:
    return [Refused(COMPLETIONS, {param: value, **others}, param, code) for value in values]


def chat(param: str, code: str, *values: Any, **others: Any) -> list[Refused]:
    return [Refused(CHAT, {param: value, **others}, param, code) for value in values]


def content(value: Any, param: str, code: str) -> Refused:
    return Refused(CHAT, {"messages": [USER, {"role": "user", "content": value}]}, param, code)


TYPE, VALUE, UNSUPPORTED = "invalid_type", "invalid_value", "unsupported_value"
INVALID_JSON = [
    b"",
    b"{",
    b'{"prompt": "hi"',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "hi", "temperature": NaN}',
    b'{"prompt": "hi", "temperature": Infinity}',
    b'{"prompt": "hi", "temperature": -Infinity}',
    b'{"prompt": "hi", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"[" * 100_000,
    b'{"prompt": "hi", "seed": ' + b"9" * 10_000 + b"}",
    b"[]",
    b"5",
    b"null",
]
REFUSED = [
    Refused(COMPLETIONS, {"model": "nope"}, "model", "model_not_found", 404),
    Refused(CHAT, {"model": "nope"}, "model", "model_not_found", 404),
    *completions("model", TYPE, 5, ["smollm2"]),
    # Prompts.
    *completions("prompt", "missing_required_parameter", None),
    *completions("prompt", TYPE, 5, {}, True, ["a", [1]], [1, "a"], [1, True], [1.5], [["a"]], [[1], "a"]),
    *completions("prompt", VALUE, "", [""], [], [[]], ["a"] * 129),
    *completions("prompt", VALUE, [-1], [10**18], [VOCABULARY], [[5], [VOCABULARY]]),
    *completions("prompt", "context_length_exceeded", [5] * (CONTEXT + 1), "word " * CONTEXT),
    *completions("prompt", "context_length_exceeded", [5] * CONTEXT, max_tokens=None),
    Refused(COMPLETIONS, {"prompt": [5] * 8, "max_tokens": CONTEXT - 7}, "prompt", "context_length_exceeded"),
    # Lengths.
    *completions("max_tokens", VALUE, -1, 2**31),
    *completions("max_tokens", TYPE, 1.5, "5", True),
    *completions("min_tokens", VALUE, -1, 2),
    *completions("min_tokens", TYPE, 1.5, "1"),
    # Sampling.
    Refused(COMPLETIONS, b'{"prompt": "hi", "temperature": 1e400}', "temperature"),
    *completions("temperature", VALUE, -0.1, 2.1),
    *completions("temperature", TYPE, "hot", True, [1]),
    *completions("top_p", VALUE, -0.1, 1.1),
    *completions("top_p", TYPE, "x"),
    *completions("min_p", VALUE, -0.1, 1.1),
    *completions("top_k", VALUE, -2, 2**31),
    *completions("top_k", TYPE, 0.01, "5"),
    *completions("frequency_penalty", VALUE, -2.1, 2.1),
    *completions("presence_penalty", VALUE, -2.1, 2.1),
    *completions("presence_penalty", TYPE, "x"),
    *completions("repetition_penalty", VALUE, 0, -1, 2.1),
    *completions("logit_bias", VALUE, {"191222": 1}, {str(VOCABULARY): 1}, {"-1": 1}, {"abc": 1}, {"1.5": 1}),
    *completions("logit_bias", VALUE, {"5": 101}, {"5": -101}, {str(i): 1 for i in range(301)}),
    *completions("logit_bias", TYPE, [1], "x", {"5": "x"}, {"5": None}),
    *completions("seed", VALUE, 2**63, -(2**63) - 1),
    *completions("seed", TYPE, 1.5, "1"),
    # Numbers of answers.
    *completions("n", VALUE, 0, -1, 17, 5_000_000),
    *completions("n", TYPE, 1.5, "2"),
    *completions("best_of", VALUE, 0, 17),
    *completions("best_of", VALUE, 1, n=2),
    *completions("best_of", VALUE, 2, stream=True),
    *completions("best_of", TYPE, "2"),
    # Ends.
    *completions("stop", VALUE, "", ["x", ""], ["x"] * 17, ["x"] * 1000, "x" * 4097),
    *completions("stop", TYPE, 5, [5], {}),
    *completions("stop_token_ids", VALUE, [10**6], [-1], [5] * 33),
    *completions("stop_token_ids", TYPE, "x", 5),
    Refused(COMPLETIONS, {"stop_token_ids": [1.5]}, "stop_token_ids[0]", TYPE),
    *completions("ignore_eos", TYPE, 1),
    *completions("skip_special_tokens", TYPE, "yes"),
    *completions("include_stop_str_in_output", TYPE, "yes"),
    *completions("spaces_between_special_tokens", TYPE, "yes"),
    # What comes back.
    *completions("logprobs", VALUE, -1, 21, 2_000_000_000),
    *completions("logprobs", TYPE, True, 1.5, "1"),
    *completions("echo", TYPE, 1),
    *completions("stream", TYPE, 1, "true"),
    *completions("stream_options", VALUE, {"include_usage": True}, stream=False),
    *completions("stream_options", TYPE, 5, stream=True),
    Refused(
        COMPLETIONS, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", TYPE
    ),
    *completions("timing", TYPE, 1),
    *completions("return_token_ids", TYPE, 1),
    *completions("add_special_tokens", TYPE, 1),
    # Others.
    *completions("suffix", UNSUPPORTED, "x"),
    *completions("prompt_logprobs", UNSUPPORTED, 1),
    *completions("use_beam_search", UNSUPPORTED, True),
    *completions("priority", VALUE, 2**63),
    *completions("priority", TYPE, "high", 1.5),
    *completions("metadata", TYPE, 5),
    *completions("store", TYPE, "x"),
    *(
        row
        for name in ("user", "service_tier", "prompt_cache_key", "safety_identifier")
        for row in completions(name, TYPE, 5)
    ),
    # Messages.
    *chat("messages", "missing_required_parameter", None),
    *chat("messages", VALUE, []),
    *chat("messages", TYPE, "x", 5, {}),
    Refused(CHAT, {"messages": [5]}, "messages[0]", TYPE),
    Refused(CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    Refused(CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    Refused(CHAT, {"messages": [USER] * 4097}, "messages"),
    content(5, "messages[1].content", TYPE),
    content(None, "messages[1].content", "missing_required_parameter"),
    content([5], "messages[1].content", TYPE),
    content([{"type": "text"}], "messages[1].content", TYPE),
    content([{"type": "image_url", "image_url": {"url": "x"}}], "messages[1].content", UNSUPPORTED),
    content([{"type": "input_audio", "input_audio": {}}], "messages[1].content", UNSUPPORTED),
    content("word " * CONTEXT, "messages", "context_length_exceeded"),
    Refused(CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "invalid_json"),
    *chat("max_tokens", VALUE, 0),
    *chat("max_completion_tokens", VALUE, 0),
    *chat("max_completion_tokens", TYPE, "5"),
    *chat("logprobs", TYPE, 1),
    *chat("top_logprobs", VALUE, 1),
    *chat("top_logprobs", VALUE, -1, 21, 16384, 2_000_000_000, logprobs=True),
    *chat("continue_final_message", VALUE, True, messages=[USER]),
    *chat("continue_final_message", VALUE, True, messages=[USER, ASSISTANT], add_generation_prompt=True),
    *chat("chat_template_kwargs", VALUE, {"messages": []}, {"x": "a" * 17_000}),
    *chat("chat_template_kwargs", TYPE, 5),
    *chat("best_of", UNSUPPORTED, 2),
    *chat("chat_template", UNSUPPORTED, "x"),
    *chat("tools", TYPE, 5),
    *chat("tools", VALUE, []),
    *chat("tool_choice", VALUE, "auto"),
    Refused(CHAT, {"messages": [USER, ASSISTANT | {"tool_calls": 1}]}, "messages[1].tool_calls", TYPE),
    Refused(CHAT, {"messages": [{"role": "assistant"}]}, "messages[0].content", "missing_required_parameter"),
    Refused(CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    Refused(CHAT, {"response_format": {"type": "wizard"}}, "response_format.type"),
    *chat("response_format", TYPE, "json"),
    *chat("functions", UNSUPPORTED, [{"name": "f"}]),
    *chat("audio", UNSUPPORTED, {}),
    # Tokens.
    Refused(TOKENIZE, {"prompt": None}, "prompt", "missing_required_parameter"),
    Refused(TOKENIZE, {"prompt": ["x"]}, "prompt", TYPE),
    Refused(TOKENIZE, {"model": "nope"}, "model", "model_not_found", 404),
    Refused(DETOKENIZE, {"tokens": [VOCABULARY]}, "tokens"),
    Refused(DETOKENIZE, {"tokens": "x"}, "tokens", TYPE),
    # Bodies.
    *(Refused(COMPLETIONS, body, None, "invalid_json") for body in INVALID_JSON),
]
GOOD: dict[str, Json] = {
    COMPLETIONS: {"model": "smollm2", "prompt": "The sea", "max_tokens": 1},
    CHAT: {"model": "smollm2", "messages": [USER], "max_tokens": 1},
    TOKENIZE: {"prompt": "x"},
    DETOKENIZE: {"tokens": [5]},
}


def send_refused(client: httpx.Client, row: Refused) -> httpx.Response:
    if isinstance(row.fields, bytes):
        return client.post(row.path, content=row.fields, headers=JSON_TYPE)
    return client.post(row.path, json=GOOD[row.path] | row.fields)


def send_refused_streamed(client: httpx.Client, row: Refused) -> httpx.Response:
    """What is wrong has its status before a stream begins, too."""
    if isinstance(row.fields, bytes) or row.path not in (COMPLETIONS, CHAT):
        return send_refused(client, row)
    return client.post(row.path, json=GOOD[row.path] | {"stream": True} | row.fields)


@pytest.fixture(scope="module", autouse=True)
def still_alive(chat_cluster: LiveCluster) -> Iterator[None]:
    """After everything here the cluster answers as it did before."""
    before = chat_cluster.complete("The sea", max_tokens=3, temperature=0)["choices"]
    yield
    assert chat_cluster.client.get("/health").status_code == 200
    assert chat_cluster.complete("The sea", max_tokens=3, temperature=0)["choices"] == before


@pytest.fixture(scope="module")
def refusals(chat_cluster: LiveCluster) -> list[tuple[httpx.Response, ...]]:
    """All rows, streamed and not, while good requests run beside them and stay right."""
    fields = {"max_tokens": 16, "seed": 5, "temperature": 1, "return_token_ids": True}
    alone = chat_cluster.complete("The sea", **fields)["choices"]
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(chat_cluster.complete, "The sea", **fields) for _ in range(2)]
        whole = pool.map(lambda row: send_refused(chat_cluster.client, row), REFUSED)
        streamed = pool.map(lambda row: send_refused_streamed(chat_cluster.client, row), REFUSED)
        answers = list(zip(whole, streamed, strict=True))
        assert all(future.result()["choices"] == alone for future in good)
    return answers


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda number: str(REFUSED[number]))
def test_refused(refusals: list[tuple[httpx.Response, ...]], number: int) -> None:
    """The status, the code and the field; the message says what is allowed and nothing of the body or of Python."""
    row = REFUSED[number]
    for response in refusals[number]:
        assert response.status_code == row.status, response.text
        assert response.headers.get_list("content-type") == ["application/json"]
        assert len(response.headers.get_list("server")) <= 1
        assert response.headers["x-request-id"]
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["param"], error["code"]) == (row.param, row.code), error
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 1024
        assert not any(word in error["message"] for word in ("Traceback", "Error", "pydantic", "jinja"))


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"prompt": [5] * 8, "max_tokens": CONTEXT - 7}, {CONTEXT, 8, CONTEXT - 7}),
        ({"prompt": [5] * (CONTEXT + 1), "max_tokens": None}, {CONTEXT, CONTEXT + 1}),
    ],
)
def test_the_context_error_says_what_is_too_long(chat_cluster: LiveCluster, fields: Json, numbers: set[int]) -> None:
    """It names the true limit, the prompt's tokens, and max_tokens where it was given."""
    error = chat_cluster.client.post(COMPLETIONS, json=fields).json()["error"]
    words = error["message"].replace(",", " ").replace(";", " ").replace(".", " ").split()
    assert {str(number) for number in numbers} <= set(words)
    assert "-" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "code"),
    [
        ("POST", COMPLETIONS, {}, b"{}", 415, "unsupported_media_type"),
        ("POST", CHAT, {"content-type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
        ("POST", COMPLETIONS, {"content-type": "application/x-www-form-urlencoded"}, b"a=1", 415, None),
        ("GET", COMPLETIONS, {}, b"", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", {}, b"", 405, "method_not_allowed"),
        ("POST", "/v1/nowhere", JSON_TYPE, b"{}", 404, "not_found"),
        ("POST", COMPLETIONS + "/", JSON_TYPE, b"{}", 404, "not_found"),
        ("GET", "/v1/models/nope", {}, b"", 404, "model_not_found"),
        ("POST", COMPLETIONS, JSON_TYPE, b" " * (MAX_BODY_BYTES + 1), 413, "request_too_large"),
        ("POST", COMPLETIONS, JSON_TYPE, b'{"prompt": 5, "x": "' + b"a" * (1 << 20) + b'"}', 400, TYPE),
        ("POST", COMPLETIONS, {"content-type": "application/json; charset=utf-8"}, b'{"prompt": 5}', 400, TYPE),
    ],
)
def test_http(
    chat_cluster: LiveCluster, method: str, path: str, headers: Json, body: bytes, status: int, code: str | None
) -> None:
    """The same envelope for whatever HTTP itself gets wrong; 1 MiB is no large body."""
    response = chat_cluster.client.request(method, path, headers=headers, content=body)
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert code in (None, response.json()["error"]["code"])
    assert (response.headers.get("allow") is not None) == (status == 405)


# Bodies that must be served, with what must be true of the whole answer; the stream must agree with it.
Check = Callable[[Json], bool]
CONTROLS = "\x00\x07\ufeff\u202eabc e\u0301 \u200d 👩‍👩‍👧 \U0001f600 \u2028\x85"
FORCED_EOS = {str(EOS): 100}


def text_of(body: Json, index: int = 0) -> str:
    return body["choices"][index]["text"]


def message_of(body: Json) -> str:
    return body["choices"][0]["message"]["content"]


def reasons(body: Json) -> list[str]:
    return [choice["finish_reason"] for choice in body["choices"]]


def tokens_out(body: Json) -> int:
    return body["usage"]["completion_tokens"]


def talk(*messages: Json, **fields: Any) -> tuple[str, Json]:
    return CHAT, {"messages": list(messages), "max_tokens": 2, "temperature": 0, **fields}


def go_on(prompt: Any, **fields: Any) -> tuple[str, Json]:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}


def lowest_logprob(body: Json) -> float:
    logprobs = body["choices"][0]["logprobs"]
    return min(logprob for top in logprobs["top_logprobs"] for logprob in top.values())


SERVED: dict[str, tuple[tuple[str, Json], Check]] = {
    "no model, no length": (go_on("The sea", max_tokens=None, ignore_eos=True), lambda body: tokens_out(body) == 16),
    "no tokens": (go_on("The sea", max_tokens=0), lambda body: (text_of(body), tokens_out(body)) == ("", 0)),
    "echo alone": (
        go_on("The sea", max_tokens=0, echo=True),
        lambda body: (text_of(body), tokens_out(body), reasons(body)) == ("The sea", 0, ["length"]),
    ),
    "controls": (go_on(CONTROLS, max_tokens=0, echo=True), lambda body: text_of(body) == CONTROLS),
    "the end of a stream": (
        go_on("a\n\ndata: [DONE]\n\nb", echo=True),
        lambda body: text_of(body).startswith("a\n\ndata: [DONE]\n\nb"),
    ),
    "Chinese, Japanese, Korean": (
        go_on("人生は短い。朋友們好！안녕하세요 세계", echo=True, max_tokens=12),
        lambda body: text_of(body).startswith("人生は短い。朋友們好！안녕하세요 세계"),
    ),
    "scoring as lm-eval does": (
        go_on([[504, 3575], [504, 3575, 282]], echo=True, max_tokens=1, logprobs=10, seed=1234),
        lambda body: [len(c["logprobs"]["token_logprobs"]) for c in body["choices"]] == [3, 4],
    ),
    "scoring alone": (
        go_on([[504, 3575], [504, 3575, 282]], echo=True, max_tokens=0, logprobs=10, seed=1234),
        lambda body: [c["logprobs"]["token_logprobs"][0] for c in body["choices"]] == [None, None],
    ),
    "one prompt in a list": (go_on(["The sea"]), lambda body: len(body["choices"]) == 1),
    "three prompts, two answers": (
        go_on(["The sea", "A", "B C"], n=2),
        lambda body: text_of(body, 0) == text_of(body, 1) and len(body["choices"]) == 6,
    ),
    "the context, to the last token": (
        go_on([5] * 8, max_tokens=CONTEXT - 8, logit_bias=FORCED_EOS),
        lambda body: (tokens_out(body), reasons(body)) == (1, ["stop"]),
    ),
    "floor of log-probabilities": (
        go_on("a", temperature=0.01, top_p=0.3, logprobs=5),
        lambda body: lowest_logprob(body) >= -9999,
    ),
    "special token among the best": (
        go_on("a", logit_bias=FORCED_EOS, logprobs=20),
        lambda body: body["choices"][0]["logprobs"]["tokens"] == ["<|im_end|>"],
    ),
    "end of sequence": (
        go_on("a", logit_bias=FORCED_EOS),
        lambda body: (text_of(body), reasons(body)) == ("", ["stop"]),
    ),
    "length": (go_on("a", max_tokens=3, ignore_eos=True), lambda body: reasons(body) == ["length"]),
    "three answers": (
        go_on("The sea", n=3, temperature=1, seed=3, return_token_ids=True, max_tokens=4),
        lambda body: tokens_out(body) == sum(len(choice["token_ids"]) for choice in body["choices"]),
    ),
    "chat": (talk(SYSTEM, USER), lambda body: body["choices"][0]["message"]["role"] == "assistant"),
    "chat ends": (talk(SYSTEM, USER, logit_bias=FORCED_EOS, n=2), lambda body: reasons(body) == ["stop", "stop"]),
    "newer length wins": (talk(SYSTEM, USER, max_completion_tokens=1), lambda body: tokens_out(body) == 1),
    "logprobs without alternatives": (
        talk(SYSTEM, USER, logprobs=True),
        lambda body: [e["top_logprobs"] for e in body["choices"][0]["logprobs"]["content"]] == [[], []],
    ),
    "logprobs with alternatives": (
        talk(SYSTEM, USER, logprobs=True, top_logprobs=3, logit_bias=FORCED_EOS),
        lambda body: len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3,
    ),
    "assistant goes on": (
        talk(SYSTEM, USER, ASSISTANT, continue_final_message=True, echo=True),
        lambda body: message_of(body).startswith("Hello") and "<|im_start|>" not in message_of(body),
    ),
    "echo after the user": (talk(SYSTEM, USER, echo=True), lambda body: "Say hi." not in message_of(body)),
}

# Bodies that must be served as well; how, other tests say.
NULLS = dict.fromkeys(["logprobs", "stop", "seed", "n", "echo", "suffix", "user", "logit_bias", "stream", "model"])
CONVERSATIONS: list[list[Json]] = [
    [SYSTEM, USER],
    [{"role": "system", "content": ""}, USER],
    [{"role": "developer", "content": "Be brief."}, USER],
    [SYSTEM, USER, SYSTEM, USER],
    [SYSTEM, USER, USER],
    [ASSISTANT],
    [SYSTEM, USER, ASSISTANT],
    [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi."}]}],
    [SYSTEM, USER, ASSISTANT, {"role": "tool", "content": [{"type": "text", "text": "4"}]}],
    [SYSTEM, USER, ASSISTANT | {"tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "4"}],
]
ACCEPTED: list[tuple[str, Json]] = [
    *(talk(*messages, max_tokens=1) for messages in CONVERSATIONS),
    talk(SYSTEM, USER, max_tokens=1, chat_template_kwargs={"enable_thinking": False}),
    go_on("a", max_tokens=1, **NULLS),
    go_on("a", max_tokens=1, brand_new={"x": 1}),
    go_on("a", max_tokens=1, user="u", metadata={"a": "b"}, store=True, service_tier="auto", priority=-1, min_tokens=0),
    go_on("a", max_tokens=1, temperature=1e-9, top_p=0, top_k=0, min_p=0, stop=[]),
    go_on("a", max_tokens=1, stop=["q1", "q2", "q3", "q4", "q5"]),
]


def test_accepted(chat_cluster: LiveCluster) -> None:
    """All roles in any order, parts, nulls, fields that nobody knows, and the edges of the bounds."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda row: chat_cluster.client.post(row[0], json=row[1]), ACCEPTED))
    for (_, body), answer in zip(ACCEPTED, answers, strict=True):
        assert answer.status_code == 200, f"{body}: {answer.text}"
        assert tokens_out(answer.json()) == 1


@pytest.fixture(scope="module")
def served(chat_cluster: LiveCluster) -> Iterator[dict[str, Future[tuple[Json, list[Json]]]]]:
    with ThreadPoolExecutor(16) as pool:
        yield {
            name: pool.submit(ask_both, chat_cluster.client, path, body) for name, ((path, body), _) in SERVED.items()
        }


@pytest.mark.parametrize("name", SERVED)
def test_served(served: dict[str, Future[tuple[Json, list[Json]]]], name: str) -> None:
    """What the row says of the whole answer, and the same in the stream."""
    (path, _), check = SERVED[name]
    whole, chunks = served[name].result()
    assert whole["model"] == "smollm2"
    assert whole["object"] == ("chat.completion" if path == CHAT else "text_completion")
    assert check(whole), json.dumps(whole)
    assert_agree(whole, chunks, is_chat=path == CHAT)


def test_all_forms_of_a_prompt_are_the_same(chat_cluster: LiveCluster) -> None:
    """As a string, as ids, and each in a list: one text and one usage."""
    prompt = "The sea — il y a 海"
    ids = chat_cluster.client.post(TOKENIZE, json={"prompt": prompt}).json()["tokens"]
    assert chat_cluster.client.post(DETOKENIZE, json={"tokens": ids}).json() == {"prompt": prompt}
    forms: list[Any] = [prompt, [prompt], ids, [ids]]
    bodies = [chat_cluster.complete(form, max_tokens=3, temperature=0, echo=True) for form in forms]
    assert all(body["choices"] == bodies[0]["choices"] for body in bodies)
    assert all(body["usage"] == bodies[0]["usage"] for body in bodies)
    assert bodies[0]["usage"]["prompt_tokens"] == len(ids)


def test_a_chat_is_the_completion_of_its_rendered_prompt(chat_cluster: LiveCluster) -> None:
    """What /tokenize says of a conversation is what is sent for it: exactly one begin of each turn, and no more."""
    client = chat_cluster.client
    ids = client.post(TOKENIZE, json={"messages": [SYSTEM, USER]}).json()["tokens"]
    text = client.post(DETOKENIZE, json={"tokens": ids}).json()["prompt"]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    assert text == turns
    path, body = talk(SYSTEM, USER, max_tokens=4)
    chat_body = client.post(path, json=body).json()
    assert chat_body["usage"]["prompt_tokens"] == len(ids)
    assert message_of(chat_body) == text_of(chat_cluster.complete(text, max_tokens=4, temperature=0))


def test_seeds(chat_cluster: LiveCluster) -> None:
    """The same seed gives the same answer, another one another; a second answer has the next seed."""

    def ask(seed: int, n: int = 1) -> list[str]:
        body = chat_cluster.complete("The sea", max_tokens=5, temperature=1.5, seed=seed, n=n)
        return [choice["text"] for choice in body["choices"]]

    first, second = ask(1), ask(2)
    assert ask(1, n=2) == [*first, *second]
    assert first != second


@pytest.mark.parametrize("keeps", [False, True])
def test_stop_strings_over_the_borders_of_tokens(chat_cluster: LiveCluster, keeps: bool) -> None:
    """Wherever a stop begins and ends, the text ends there, and both modes count the same tokens."""
    fields = {"max_tokens": 6, "ignore_eos": True}
    text = text_of(chat_cluster.complete("The sea is", temperature=0, **fields))
    with ThreadPoolExecutor(8) as pool:
        stops = [text[start : start + length] for start in (1, 6) for length in (2, 5)]
        extra = {"include_stop_str_in_output": keeps, "timing": True}
        rows = [go_on("The sea is", **fields, stop=[stop, "nowhere"], **extra) for stop in stops]
        answers = list(pool.map(lambda row: ask_both(chat_cluster.client, *row), rows))
    for stop, (whole, chunks) in zip(stops, answers, strict=True):
        begin = text.index(stop)
        assert text_of(whole) == text[: begin + len(stop) if keeps else begin]
        assert reasons(whole) == ["stop"]
        assert whole["timing"]["num_output_tokens"] == tokens_out(whole)
        assert_agree(whole, chunks, is_chat=False)


def test_an_official_list_of_models(chat_cluster: LiveCluster) -> None:
    (card,) = chat_cluster.client.get("/v1/models").json()["data"]
    assert card == chat_cluster.client.get("/v1/models/smollm2").json()
    assert {"id", "object", "created", "owned_by", "max_model_len"} <= card.keys()
