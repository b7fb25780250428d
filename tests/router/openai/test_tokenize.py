"""/tokenize and /detokenize: the ids that the completions endpoints would send, and the text of ids."""

from typing import Any

import pytest

USER = [{"role": "user", "content": "hi"}]
HALF = [*USER, {"role": "assistant", "content": "Hel"}]
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def test_a_text_becomes_what_a_completion_would_send(call: Any, backend: Any) -> None:
    """With the shape of the answer that vLLM gives."""
    body = call("POST", TOKENIZE, json={"model": "tiny", "prompt": "hello é"}).json()
    call("POST", "/v1/completions", json={"prompt": "hello é"})
    assert body["tokens"] == list(backend.requests[0].token_ids)
    assert body == {"count": len(body["tokens"]), "max_model_len": 1024, "tokens": body["tokens"], "token_strs": None}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": USER},
        {"messages": USER, "add_generation_prompt": False},
        {"messages": HALF, "continue_final_message": True},
    ],
)
def test_a_conversation_becomes_what_a_chat_would_send(call: Any, backend: Any, fields: dict[str, Any]) -> None:
    body = call("POST", TOKENIZE, json=fields).json()
    call("POST", "/v1/chat/completions", json=fields)
    assert body["tokens"] == list(backend.requests[0].token_ids)


def test_tokens_have_names(call: Any) -> None:
    body = call("POST", TOKENIZE, json={"prompt": "hello<|im_end|> w", "return_token_strs": True}).json()
    assert body["token_strs"] == ["hell", "o", "<|im_end|>", "Ġw"]


@pytest.mark.parametrize("text", ["", "hello <|im_start|>é😀\u0000", "x" * 10_000])
def test_detokenize_undoes_tokenize(call: Any, text: str) -> None:
    """Long or short, special tokens included."""
    tokens = call("POST", TOKENIZE, json={"prompt": text}).json()["tokens"]
    assert call("POST", DETOKENIZE, json={"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (TOKENIZE, {}, 400, "prompt"),
        (TOKENIZE, {"prompt": ["a"]}, 400, "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": USER}, 400, "prompt"),
        (TOKENIZE, {"messages": []}, 400, "messages"),
        (TOKENIZE, {"messages": USER, "continue_final_message": True}, 400, "continue_final_message"),
        (TOKENIZE, {"prompt": "a", "model": "nope"}, 404, "model"),
        (TOKENIZE, {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        (DETOKENIZE, {}, 400, "tokens"),
        (DETOKENIZE, {"tokens": "a"}, 400, "tokens"),
        (DETOKENIZE, {"tokens": [True]}, 400, "tokens[0]"),
        (DETOKENIZE, {"tokens": [265]}, 400, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, 400, "tokens"),
        (DETOKENIZE, {"tokens": [1], "model": "nope"}, 404, "model"),
    ],
)
def test_bad_bodies(call: Any, path: str, body: dict[str, Any], status: int, param: str) -> None:
    response = call("POST", path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_both_are_counted(call: Any) -> None:
    call("POST", TOKENIZE, json={"prompt": "a", "newest": 1})
    call("POST", DETOKENIZE, json={"tokens": [10**9]})
    page = call("GET", "/metrics").text
    assert 'twinpool_requests_total{endpoint="tokenize",outcome="finished"} 1.0' in page
    assert 'twinpool_requests_total{endpoint="detokenize",outcome="invalid_value"} 1.0' in page
    assert 'twinpool_unknown_fields_total{endpoint="tokenize"} 1.0' in page
