"""The endpoint over a scripted backend: bodies, streams, failures, leaving clients."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from twinpool.router.app import Application, create_admin_app, create_app
from twinpool.router.openai.chat_template import ChatPrompt

USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAIT_S = 10


def test_whole_completion(call: Any) -> None:
    """Every field of the answer."""
    response = call("POST", COMPLETIONS, json={"model": "tiny", "prompt": "hi"})
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    num_tokens = body["usage"]["completion_tokens"]
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": num_tokens,
            "total_tokens": num_tokens + 2,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_whole_chat(call: Any, backend: Any, tokenizer: Any) -> None:
    """The assistant's message; the prompt is the rendered template, the output limit the rest of the context."""
    body = call("POST", CHAT, json={"messages": USER}).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    request = backend.requests[0]
    assert list(request.token_ids) == tokenizer.encode_chat(ChatPrompt(USER))
    assert request.sampling.max_tokens == 1024 - len(request.token_ids)
    assert request.sampling.stop_token_ids == tuple(tokenizer.eos_ids)


def test_sampling_fields_arrive(call: Any, backend: Any) -> None:
    """Each field reaches the sampler under its name; without a seed one is drawn."""
    fields: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.0,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": -5,
    }
    extra = {"logit_bias": {"5": -100}, "stop_token_ids": [9], "ignore_eos": True, "logprobs": 0}
    call("POST", COMPLETIONS, json={"prompt": "hi"} | fields | extra)
    sampling = backend.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.num_logprobs) == ({5: -100}, (9,), 0)
    call("POST", COMPLETIONS, json={"prompt": "hi", "top_k": -1})
    call("POST", COMPLETIONS, json={"prompt": "hi"})
    assert backend.requests[1].sampling.top_k == 0
    assert backend.requests[1].sampling.seed != backend.requests[2].sampling.seed


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [("hi", 2), (["hi"], 2), (["hi", "ho", "ha"], 6), ([40, 41], 2), ([[40], [41, 42]], 4)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_n(events_of: Any, call: Any, backend: Any, prompt: Any, num_choices: int, stream: bool) -> None:
    """Every prompt form with n = 2: choices in order, seeds seed and seed + 1, prompt tokens counted once."""
    body = {"prompt": prompt, "n": 2, "seed": 2**63 - 1, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = call("POST", COMPLETIONS, json=body)
    if stream:
        *chunks, usage_chunk = events_of(response.text)
        finished = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
        assert sorted(finished) == list(range(num_choices))
        usage = usage_chunk["usage"]
    else:
        assert [choice["index"] for choice in response.json()["choices"]] == list(range(num_choices))
        assert {choice["text"] for choice in response.json()["choices"]} == {"hello world"}
        usage = response.json()["usage"]
    sent = {request.token_ids: 0 for request in backend.requests}
    assert len(backend.requests) == num_choices
    assert usage["prompt_tokens"] == sum(map(len, sent))
    assert {request.sampling.seed for request in backend.requests} == {2**63 - 1, -(2**63)}
    assert len({request.request_id for request in backend.requests}) == num_choices


def test_chat_stream_order(events_of: Any, call: Any) -> None:
    """Role chunk, content, finish, usage, [DONE]; usage is null before; one head on all chunks."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = call("POST", CHAT, json={"messages": USER} | options)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    *chunks, usage = events_of(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "hello world"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == call("POST", CHAT, json={"messages": USER}).json()["usage"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in [*chunks, usage]}) == 1


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet="ab é😀\ud7ff", max_size=25),
    stop=st.lists(st.text(alphabet="ab é", min_size=1, max_size=3), max_size=3),
    tokens_per_event=st.integers(1, 5),
    reason=st.sampled_from(["stop", "length"]),
)
@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_stream_equals_whole(
    events_of: Any,
    call: Any,
    backend: Any,
    say: Callable[..., Any],
    endpoint: str,
    text: str,
    stop: list[str],
    tokens_per_event: int,
    reason: str,
) -> None:
    """Text, log-probabilities, finish reason and usage do not depend on streaming or on how tokens are bundled."""
    backend.script = lambda request: say(text, reason, tokens_per_event)
    body: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    if endpoint == COMPLETIONS:
        body = {"prompt": "hi", "logprobs": 2}
    body["stop"] = stop
    whole = call("POST", endpoint, json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events_of(call("POST", endpoint, json=body | options).text)
    parts = [chunk["choices"][0] for chunk in chunks]
    choice = whole["choices"][0]
    streamed = "".join(part["text"] if endpoint == COMPLETIONS else part["delta"].get("content", "") for part in parts)
    assert streamed == (choice["text"] if endpoint == COMPLETIONS else choice["message"]["content"])
    assert not any(s in streamed for s in stop)
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
    key = "tokens" if endpoint == COMPLETIONS else "content"
    logprobs = [entry for part in parts if part["logprobs"] for entry in part["logprobs"][key]]
    assert logprobs == choice["logprobs"][key]
    assert len(choice["logprobs"][key]) == usage["usage"]["completion_tokens"]
    assert usage["usage"] == whole["usage"]


def test_stop_string_cancels(call: Any, backend: Any, new_gate: Any, say: Callable[..., Any]) -> None:
    """A stop string over token borders ends the request at once, although the backend would go on for ever."""
    backend.script = lambda request: [*say("one STOP")[:-1], new_gate()]
    body = call("POST", COMPLETIONS, json={"prompt": "hi", "stop": ["e STO"]}).json()
    assert body["choices"][0] == {"index": 0, "text": "on", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == len("one STO")
    assert backend.closed.is_set()


@pytest.mark.parametrize("stop", ["o", "STOP", "none"])
def test_usage_and_timing_say_what_a_stop_string_left(call: Any, backend: Any, say: Any, stop: str) -> None:
    """Regression: an answer that the router ended had neither cached tokens nor a timeline."""
    backend.script = lambda request: say("one STOP and more", "length", 4)
    body = call("POST", COMPLETIONS, json={"prompt": "hi", "stop": stop, "timing": True}).json()
    num_tokens = body["usage"]["completion_tokens"]
    assert num_tokens == {"o": 1, "STOP": 8, "none": 17}[stop]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert body["timing"]["num_output_tokens"] == num_tokens
    assert (body["timing"]["second_token_s"] is None) == (num_tokens == 1)


def test_stop_tokens_and_special_tokens_have_no_text(call: Any, backend: Any, say: Callable[..., Any]) -> None:
    """They count as tokens; special tokens show when asked for, stop tokens never do."""
    backend.script = lambda request: say("a<|im_start|>b<|im_end|>")
    body = call("POST", COMPLETIONS, json={"prompt": "hi"}).json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("ab", 4)
    body = call("POST", COMPLETIONS, json={"prompt": "hi", "skip_special_tokens": False}).json()
    assert body["choices"][0]["text"] == "a<|im_start|>b"


def test_min_tokens_delays_stop_strings(call: Any, backend: Any, say: Callable[..., Any]) -> None:
    """A stop string within the first min_tokens tokens is text."""
    backend.script = lambda request: say("xaxbxc")
    body = call("POST", COMPLETIONS, json={"prompt": "hi", "stop": "x", "min_tokens": 3}).json()
    assert body["choices"][0]["text"] == "xaxb"


@pytest.mark.parametrize("stream", [False, True])
def test_echo(events_of: Any, call: Any, backend: Any, stream: bool) -> None:
    """The prompt comes back as it was sent, also one that looks like the end of a stream; ids are decoded."""
    prompt = "\x00 data: [DONE]\n\né😀\ufeff"

    def text_of(fields: dict[str, Any]) -> str:
        response = call("POST", COMPLETIONS, json={"echo": True, "stream": stream} | fields)
        if not stream:
            return response.json()["choices"][0]["text"]
        return "".join(chunk["choices"][0]["text"] for chunk in events_of(response.text))

    assert text_of({"prompt": prompt}) == prompt + "hello world"
    assert len(backend.requests) == 1
    assert text_of({"prompt": prompt, "max_tokens": 0}) == prompt
    assert text_of({"prompt": list(backend.requests[0].token_ids), "max_tokens": 0}) == prompt
    assert len(backend.requests) == 1


def test_logprobs(call: Any, backend: Any, say: Callable[..., Any]) -> None:
    """Both forms; -inf becomes -9999, offsets count from the prompt's length, half characters have bytes."""
    backend.script = lambda request: say("a€", "length")
    logprobs = call("POST", COMPLETIONS, json={"prompt": "hi", "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert logprobs["text_offset"] == [2, 3, 3, 3]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "!": -9999.0}
    body = call("POST", CHAT, json={"messages": USER, "logprobs": True}).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert content[0] == {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    assert bytes(b for entry in content[1:] for b in entry["bytes"]) == "€".encode()


def test_an_event_is_one_line_for_every_reader(call: Any, backend: Any, say: Callable[..., Any]) -> None:
    """Regression: U+0085, U+2028 or U+2029 in a text cut the event in two for clients that split like Python does."""
    said = "a\u0085b\u2028c\u2029d\u001ce\nf é"
    backend.script = lambda request: say(said, "stop", 30)
    lines = call("POST", COMPLETIONS, json={"prompt": "hi", "stream": True}).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said


@pytest.mark.parametrize("stream", [False, True])
def test_timing(events_of: Any, call: Any, stream: bool) -> None:
    """The extension field returns the timeline once, with its sum and the hidden share."""
    response = call("POST", CHAT, json={"messages": USER, "timing": True, "stream": stream})
    bodies = events_of(response.text) if stream else [response.json()]
    timing = [body["timing"] for body in bodies if "timing" in body]
    assert len(timing) == 1
    assert "timing" in bodies[-1]
    assert timing[0]["prefill_s"] == 0.1
    assert timing[0]["kv_share_hidden"] == 0.95
    assert timing[0]["ttft_s"] == pytest.approx(0.12)
    assert not stream or bodies[-1]["choices"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_token_ids(events_of: Any, call: Any, path: str, stream: bool) -> None:
    """The extension field returns every output token's id once, in order, those without text included."""
    prompt = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    response = call("POST", path, json={**prompt, "return_token_ids": True, "stream": stream})
    bodies = events_of(response.text) if stream else [response.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    usage = call("POST", path, json={**prompt}).json()["usage"]
    assert len(ids) == usage["completion_tokens"] > 1
    assert not any("token_ids" in choice for choice in call("POST", path, json=prompt).json()["choices"])


def test_request_id(call: Any, backend: Any) -> None:
    """A harmless id of the client is echoed and never used; anything else is replaced; errors have one too."""
    body = {"prompt": "hi"}
    response = call("POST", COMPLETIONS, json=body, headers={"x-request-id": "My-id_1.2"})
    assert response.headers["x-request-id"] == "My-id_1.2"
    assert backend.requests[0].request_id != "My-id_1.2"
    for bad in ("x" * 129, "a b", "<script>"):
        response = call("GET", "/nope", headers={"x-request-id": bad})
        assert response.headers["x-request-id"] not in ("", bad)
    response = call("POST", COMPLETIONS, json=body)
    assert response.headers["x-request-id"] == backend.requests[1].request_id
    assert response.json()["id"] == "cmpl-" + backend.requests[1].request_id


def test_models_and_health(call: Any, backend: Any) -> None:
    """The model's card; readiness follows the backend, liveness does not."""
    listed = call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "tiny"
    assert listed["data"][0]["max_model_len"] == 1024
    assert call("GET", "/v1/models/tiny").json() == listed["data"][0]
    assert call("HEAD", "/health/ready").status_code == 200
    backend.is_ready, backend.max_model_len = False, None
    assert call("GET", "/health/live").status_code == 200
    response = call("GET", "/health/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert call("GET", "/v1/models").json()["data"][0]["max_model_len"] == 512


def test_admin_status(backend: Any) -> None:
    """The admin application shows the backend's status, and none of the clients' paths."""

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(create_admin_app(backend))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            return await client.get(path)

    assert asyncio.run(get("/status")).json() == backend.status()
    assert asyncio.run(get("/v1/models")).json()["error"]["code"] == "not_found"


def test_long_prompts_do_not_stop_the_loop(app: Application, backend: Any) -> None:
    """While a prompt of 1 MB is tokenised, liveness is answered again and again."""
    backend.max_model_len = 500_000  # it has more tokens, but not so many more that its length alone tells

    async def count_answers() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            body = {"prompt": "hello world " * 90_000}
            long = asyncio.create_task(client.post(COMPLETIONS, json=body))
            num_answers = 0
            while not long.done():
                assert (await client.get("/health/live")).status_code == 200
                num_answers += 1
                await asyncio.sleep(0)  # in process, a call alone never gives way
            assert (await long).status_code == 400
            return num_answers

    assert asyncio.run(count_answers()) > 20


def test_app_is_built_without_workers(backend: Any, tokenizer: Any) -> None:
    """Building the application asks the backend nothing; two applications share no metric."""
    backend.max_model_len = None
    backend.status = None
    create_app(backend, tokenizer, "tiny")
    create_app(backend, tokenizer, "tiny")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_generation_is_posted(call: Any, path: str) -> None:
    """The short way is for POST alone."""
    response = call("GET", path)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
