"""Every parameter at its limit, one beyond, at 10**9, -1, NaN and of another kind: taken, or a quick 400 that names it.

The limits that workers keep as well are theirs, too: what is refused here would be refused there.
"""

import gzip
import json
import statistics
import time
from typing import Any

import msgpack
import pytest
from twinpool.cluster.protocol.codec import FROM_ROUTER, decode
from twinpool.cluster.protocol.errors import ProtocolError
from twinpool.cluster.protocol.identity import PROTOCOL_VERSION
from twinpool.cluster.protocol.messages import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 1024
HI = [40, 41]
BILLION = 10**9
Json = dict[str, Any]

# Parameter → (values that are taken, values that are not): the limit in the one, what is just beyond in the other.
NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([1, CONTEXT - 2], [CONTEXT - 1, 2**31, BILLION, -1]),
    "min_tokens": ([0, 16], [17, 2**31, BILLION, -1]),
    "temperature": ([0, 2], [2.0001, BILLION, -1, -0.0001]),
    "top_p": ([0, 1], [1.0001, BILLION, -1]),
    "top_k": ([-1, 0, BILLION, 2**31 - 1], [2**31, -2]),
    "min_p": ([0, 1], [1.0001, BILLION, -1]),
    "presence_penalty": ([-2, 2], [2.0001, -2.0001, BILLION]),
    "frequency_penalty": ([-2, 2], [2.0001, -2.0001, BILLION]),
    "repetition_penalty": ([0.0001, 2], [0, 2.0001, BILLION, -1]),
    "n": ([1, 16], [17, 0, BILLION, -1]),
    "seed": ([-(2**63), -1, BILLION, 2**63 - 1], [2**63, -(2**63) - 1, 2**64]),
    "priority": ([-(2**63), -1, BILLION, 2**63 - 1], [2**63, -(2**63) - 1]),
}
ONLY_COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "logprobs": ([0, 20], [21, BILLION, -1]),
    "best_of": ([1, 16], [17, 0, BILLION, -1]),
}
ONLY_CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    "max_completion_tokens": ([1, 900], [CONTEXT, BILLION, -1, 0]),
    "top_logprobs": ([0, 20], [21, BILLION, -1]),
}
NO_NUMBERS: list[Any] = ["5", "x", "", True, [], [1], {}, {"a": 1}]
NO_JSON = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 5000, "0x10", "1_000", "01", "+1"]


def at_most(limit: int, make: Any) -> tuple[list[Any], list[Any]]:
    return [make(limit)], [make(limit + 1), make(40 * limit)]


SIZES: dict[str, tuple[list[Any], list[Any]]] = {
    "stop": at_most(16, lambda count: ["x"] * count),
    "stop_token_ids": at_most(32, lambda count: [5] * count),
    "logit_bias": at_most(300, lambda count: {f"{i % 200:0{4 + i // 200}d}"[:10]: 1 for i in range(min(count, 1200))}),
}


def body_of(path: str, fields: Json) -> Json:
    if path == COMPLETIONS:
        return {"prompt": HI, "max_tokens": 16} | fields
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "logprobs": True} | fields


def rows(path: str) -> dict[str, tuple[list[Any], list[Any]]]:
    return NUMBERS | (ONLY_COMPLETIONS if path == COMPLETIONS else ONLY_CHAT)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_limit_holds_and_nothing_below_it_is_refused(call: Any, backend: Any, path: str) -> None:
    """A refusal names the parameter, or the prompt where both together are too long; median below 50 ms."""
    took_s: list[float] = []
    for name, (taken, refused) in (rows(path) | SIZES).items():
        for value in taken:
            if path == CHAT and value == CONTEXT - 2:
                continue  # the template makes the prompt longer
            response = call("POST", path, json=body_of(path, {name: value}))
            assert response.status_code == 200, (name, value, response.text)
        num_asked = len(backend.requests)
        wrong_kinds = NO_NUMBERS if name in rows(path) else [5, True, [None], {"a": "b"}]
        for value in (*refused, *wrong_kinds):
            began_s = time.perf_counter()
            response = call("POST", path, json=body_of(path, {name: value}))
            took_s.append(time.perf_counter() - began_s)
            assert response.status_code == 400, (name, value, response.text)
            param = response.json()["error"]["param"]
            assert param.startswith(name) or param in ("prompt", "messages", "max_tokens", "min_tokens"), (name, value)
        assert len(backend.requests) == num_asked, f"a refused {name} reached the workers"
    assert statistics.median(took_s) < 0.05


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_is_no_number_of_json_is_refused(call: Any, backend: Any, path: str) -> None:
    for name in rows(path):
        for value in NO_JSON:
            text = json.dumps(body_of(path, {name: "@"})).replace('"@"', value)
            response = call("POST", path, content=text, headers={"content-type": "application/json"})
            assert response.status_code == 400, (name, value, response.text)
    assert backend.requests == []


@pytest.mark.parametrize("name", ["prompt", "messages", "model", "stop", "metadata", "tools", "brand_new"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_json_is_refused(call: Any, backend: Any, name: str, opening: str) -> None:
    """Wherever it stands, a field that nobody knows included."""
    closing = "]" if opening == "[" else "}"
    for depth in (1000, 20_000):
        value = opening * depth + "1" + closing * depth
        for path in (COMPLETIONS, CHAT):
            fields = {key: value for key, value in body_of(path, {}).items() if key != name}
            text = json.dumps(fields)[:-1] + f', "{name}": {value}}}'
            response = call("POST", path, content=text, headers={"content-type": "application/json"})
            assert response.status_code == 400, (path, name)
    assert backend.requests == []


@pytest.mark.parametrize("character", ["x", "\n", "é", "ab c"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_prompt_of_ten_megabytes_is_refused_before_it_is_tokenised(
    call: Any, backend: Any, path: str, character: str
) -> None:
    """Regression: it was tokenised first, which takes five seconds; 32 MB are allowed, and many may come at once."""
    text = character * (10_000_000 // len(character.encode()))
    fields: Json = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    took_s: list[float] = []
    for _ in range(3):
        began_s = time.perf_counter()
        response = call("POST", path, json=fields)
        took_s.append(time.perf_counter() - began_s)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert (error["param"], "at least" in error["message"]) == (next(iter(fields)), True)
    assert min(took_s) < 0.5
    assert backend.requests == []


def test_a_compressed_body_is_not_unpacked(call: Any, backend: Any) -> None:
    """A hundred megabytes in a hundred kilobytes: the bytes that came are no JSON, and nobody inflates them."""
    bomb = gzip.compress(b'{"prompt": "' + b"x" * 100_000_000 + b'"}', compresslevel=1)
    assert len(bomb) < 1_000_000
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    began_s = time.perf_counter()
    response = call("POST", COMPLETIONS, content=bomb, headers=headers)
    assert response.status_code in (400, 415)
    assert time.perf_counter() - began_s < 1.0
    assert backend.requests == []


@pytest.mark.parametrize("name", sorted(set(NUMBERS) & set(SamplingParams.model_fields)))
def test_a_worker_refuses_what_the_router_does(name: str) -> None:
    """The same values in an order to a worker: no message at all. What depends on the model is for its core to say."""
    of_the_model = {"max_tokens": (CONTEXT - 1, 2**31, BILLION), "min_tokens": (17, 2**31, BILLION), "top_k": (2**31,)}
    for value in (*NUMBERS[name][1], "x", [], {}, float("nan"), float("inf")):
        if isinstance(value, int) and value in of_the_model.get(name, ()):
            continue
        sampling = SamplingParams().model_dump() | {name: value}
        fields = {"request_id": "r", "attempt": 1, "arrival_order": 1, "sampling": sampling}
        try:
            packed: bytes = msgpack.packb([PROTOCOL_VERSION, "GrantRequest", fields])
        except OverflowError:
            continue  # msgpack cannot even say it
        with pytest.raises(ProtocolError):
            decode([packed], FROM_ROUTER)
