"""Fields that mean something to the router alone: candidates, continued messages, template variables, kept stops."""

from collections.abc import Callable
from typing import Any

import pytest
from twinpool.cluster.protocol.messages import SampledToken
from twinpool.router.generation import Finished, GenerationRequest, TokensSent
from twinpool.router.openai.chat_template import ChatPrompt

USER = [{"role": "user", "content": "hi"}]
HALF = [*USER, {"role": "assistant", "content": "Hel "}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("prompt", ["hi", ["hi", "ho"]])
def test_best_of_returns_the_likeliest(call: Any, backend: Any, say: Any, prompt: Any, logprobs: int | None) -> None:
    """Of four candidates the two with the highest mean log-probability, best first; the usage counts all four."""
    means = {0: -0.5, 1: -3.0, 2: -0.25, 3: -0.75}

    def script(request: GenerationRequest) -> list[Any]:
        number = request.sampling.seed
        assert request.sampling.num_logprobs == (logprobs or 0)
        letters = [events.tokens[0].token for events in say("abcd"[number] * (number + 1))[:-1]]
        tokens = tuple(SampledToken(token=letter, logprob=means[number]) for letter in letters)
        return [TokensSent(0, tokens), Finished("stop", say("")[-1].timeline)]

    backend.script = script
    fields = {"prompt": prompt, "n": 2, "best_of": 4, "seed": 0, "logprobs": logprobs}
    body = call("POST", COMPLETIONS, json=fields).json()
    num_prompts = 1 if isinstance(prompt, str) else len(prompt)
    assert [choice["text"] for choice in body["choices"]] == ["ccc", "a"] * num_prompts
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * num_prompts))
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == (1 + 2 + 3 + 4) * num_prompts
    assert body["usage"]["prompt_tokens"] == 2 * num_prompts


@pytest.mark.parametrize("add_generation_prompt", [None, False])
def test_the_final_message_goes_on(call: Any, backend: Any, tokenizer: Any, add_generation_prompt: bool | None) -> None:
    """The prompt ends with its content, to the last space; the answer shows it only when it is asked to."""
    fields = {"messages": HALF, "continue_final_message": True, "add_generation_prompt": add_generation_prompt}
    answers = [call("POST", CHAT, json=fields | {"echo": echo}).json() for echo in (False, True)]
    prompt = tokenizer.decode(backend.requests[0].token_ids)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHel "
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts == ["hello world", "Hel hello world"]


@pytest.mark.parametrize("messages", [USER, HALF])
def test_an_echo_of_a_turn_that_does_not_go_on_is_empty(call: Any, backend: Any, tokenizer: Any, messages: Any) -> None:
    """After the last message a new turn of the assistant begins, so nothing comes before it."""
    body = call("POST", CHAT, json={"messages": messages, "echo": True}).json()
    assert body["choices"][0]["message"]["content"] == "hello world"
    assert list(backend.requests[0].token_ids) == tokenizer.encode_chat(ChatPrompt(messages))


def test_no_turn_is_opened_when_none_is_wanted(call: Any, backend: Any, tokenizer: Any) -> None:
    call("POST", CHAT, json={"messages": USER, "add_generation_prompt": False})
    assert tokenizer.decode(backend.requests[0].token_ids) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "wor"}, "hello "),
        ({"stop": "wor", "include_stop_str_in_output": True}, "hello wor"),
        ({"stop": ["wor", "lo wor"], "include_stop_str_in_output": True}, "hello wor"),
        ({"stop": "nowhere", "include_stop_str_in_output": True}, "hello world"),
        ({"spaces_between_special_tokens": False}, "hello world"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_may_be_kept(call: Any, events_of: Any, fields: dict[str, Any], text: str, stream: bool) -> None:
    response = call("POST", COMPLETIONS, json={"prompt": "hi", "stream": stream} | fields)
    bodies = events_of(response.text) if stream else [response.json()]
    assert "".join(body["choices"][0]["text"] for body in bodies) == text


def test_stop_tokens_are_kept_likewise(call: Any, backend: Any, say: Any, tokenizer: Any) -> None:
    """A special one shows only when special tokens do."""
    backend.script = lambda request: say("ab<|im_end|>")
    fields = {"prompt": "hi", "include_stop_str_in_output": True}
    assert call("POST", COMPLETIONS, json=fields).json()["choices"][0]["text"] == "ab"
    fields["skip_special_tokens"] = False
    assert call("POST", COMPLETIONS, json=fields).json()["choices"][0]["text"] == "ab<|im_end|>"


@pytest.mark.parametrize("stop", [None, "o w"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_chunk_has_the_usage_so_far(
    call: Any, events_of: Any, backend: Any, say: Callable[..., Any], path: str, stop: str | None
) -> None:
    """Output tokens never fall, count those whose text is held back, and end at the final usage."""
    backend.script = lambda request: say("hello world")
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompt = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    body = {**prompt, "n": 2, "stop": stop, "stream": True, "stream_options": options}
    chunks = events_of(call("POST", path, json=body).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 2 * (len(say("hello w" if stop else "hello world")) - 1)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_infinite_template_variables_are_refused(call: Any) -> None:
    """A number beyond the range of floats is no JSON that a template could write down."""
    body = '{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"x": 1e400}}'
    response = call("POST", CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs"
