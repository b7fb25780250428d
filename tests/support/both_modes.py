"""One request asked twice, streamed and not: the stream is held to its shape, and to the whole answer."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

Json = dict[str, Any]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Streamed:
    """What the chunks of a stream add up to, choice by choice."""

    texts: list[str]
    token_ids: list[list[int]]
    logprobs: list[Json | None]
    finish_reasons: list[list[str]]
    usage: Json


def ask_both(client: httpx.Client, path: str, body: Json) -> tuple[Json, list[Json]]:
    """Return the whole answer and the stream's chunks; fails for any status but 200."""
    whole = client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = client.post(path, json=body | options)
    assert streamed.status_code == 200, streamed.text
    return whole.json(), chunks_of(streamed)


def chunks_of(response: httpx.Response) -> list[Json]:
    """Parse a stream strictly: LF only, nothing but data lines and comments, [DONE] last and once."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert b"\r" not in response.content
    *frames, done, rest = response.content.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    frames = [frame for frame in frames if not frame.startswith(":")]
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def assert_agree(whole: Json, chunks: list[Json], is_chat: bool) -> None:
    """The stream is the whole answer in pieces, in the order that clients rely on."""
    *parts, last = chunks
    assert last["choices"] == []
    assert all(part["usage"] is None and len(part["choices"]) == 1 for part in parts)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    streamed = add_up(chunks, len(whole["choices"]), is_chat)
    for index, choice in enumerate(whole["choices"]):
        assert choice["index"] == index
        assert streamed.texts[index] == (choice["message"]["content"] if is_chat else choice["text"])
        assert streamed.finish_reasons[index] == [choice["finish_reason"]]
        assert streamed.token_ids[index] == choice.get("token_ids", [])
        assert_close(streamed.logprobs[index], choice["logprobs"])
    assert streamed.usage == whole["usage"]
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def assert_close(got: Any, expected: Any) -> None:
    """Equal, but for numbers that other rows of a batch may move in their last digits."""
    if isinstance(expected, float):
        assert abs(got - expected) < TOLERANCE
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(got[key], value)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for left, right in zip(got, expected, strict=True):
            assert_close(left, right)
    else:
        assert got == expected


def add_up(chunks: list[Json], num_choices: int, is_chat: bool) -> Streamed:
    choices: list[list[Json]] = [[] for _ in range(num_choices)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices[choice["index"]].append(choice)
    if is_chat:
        _assert_chat_order(choices)
    return Streamed(
        texts=["".join(_text(part) for part in parts) for parts in choices],
        token_ids=[[token for part in parts for token in part.get("token_ids", [])] for parts in choices],
        logprobs=[_joined([part["logprobs"] for part in parts if part["logprobs"]]) for parts in choices],
        finish_reasons=[[part["finish_reason"] for part in parts if part["finish_reason"]] for parts in choices],
        usage=chunks[-1]["usage"],
    )


def _assert_chat_order(choices: list[list[Json]]) -> None:
    """The role first, then only deltas that bring something, then an empty one with the finish reason."""
    for first, *middle, last in choices:
        assert (first["delta"], first["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
        assert all(part["delta"].get("content") or part["logprobs"] or part.get("token_ids") for part in middle)
        assert last["delta"] == {}
        assert last["finish_reason"]


def _text(part: Json) -> str:
    return part["delta"].get("content", "") if "delta" in part else part["text"]


def _joined(logprobs: list[Json]) -> Json | None:
    if not logprobs:
        return None
    return {
        name: [entry for part in logprobs for entry in part[name]] if isinstance(values, list) else values
        for name, values in logprobs[0].items()
    }
