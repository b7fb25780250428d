"""Bad input gets OpenAI's error body with a 4xx, and disturbs nothing that runs beside it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster
from twinpool.engine.fake import expected_tokens

MODEL = "tiny-llama"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BAD: list[tuple[str, Any, int]] = [
    (COMPLETIONS, {"model": "nope", "prompt": "x"}, 404),
    (CHAT, {"model": MODEL, "messages": []}, 400),
    (CHAT, {"model": MODEL, "messages": "hello"}, 400),
    (CHAT, {"model": MODEL, "messages": [{"role": "emperor", "content": "x"}]}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": [5] * 5000}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": [5] * 100, "max_tokens": 100_000}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": [10**18]}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": [-1]}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": 7}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": "many"}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": "x", "temperature": -1}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": "x", "n": 5_000_000}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": "x", "logprobs": 2_000_000_000}, 400),
    (COMPLETIONS, {"model": MODEL, "prompt": "x", "logit_bias": {"999999": 1}}, 400),
    (COMPLETIONS, b'{"model": "tiny-llama", "prompt": ', 400),
    (COMPLETIONS, b'{"model": "tiny-llama", "prompt": "x", "temperature": NaN}', 400),
    (COMPLETIONS, b"[" * 100_000, 400),
    (COMPLETIONS, b"\xff\xfe", 400),
    ("/v1/nowhere", {}, 404),
]


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path) -> Iterator[LiveCluster]:
    fake = {"engine": {"kind": "fake"}}
    with LiveCluster(tiny_llama, {"prompt": fake, "completion": fake, "served_model_name": MODEL}) as cluster:
        yield cluster


def send(cluster: LiveCluster, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/json"}
    content = {"content": body, "headers": headers} if isinstance(body, bytes) else {"json": body}
    response = cluster.client.post(path, **content)
    return response.status_code, response.json()


def test_bad_input_is_refused_and_disturbs_nothing(cluster: LiveCluster) -> None:
    """Every bad request gets its 4xx in OpenAI's shape while good streams go on and stay right."""
    prompt = [10, 20, 30]
    right = expected_tokens(prompt, 400, 260, seed=1)
    with ThreadPoolExecutor(4) as pool:
        fields = {"max_tokens": 400, "ignore_eos": True, "seed": 1, "return_token_ids": True}
        good = [pool.submit(cluster.complete, prompt, **fields) for _ in range(4)]
        for path, body, status in BAD:
            got, answer = send(cluster, path, body)
            assert got == status, f"{str(body)[:80]}: {got} {answer}"
            assert set(answer) == {"error"}
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert answer["error"]["type"] == "invalid_request_error"
            assert len(answer["error"]["message"]) < 1024
        assert all(future.result()["choices"][0]["token_ids"] == right for future in good)
    assert cluster.client.get("/health/ready").status_code == 200
