"""Real clients, each with its own way to read: all get the same text for the same seeded request, streamed or not."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import aiohttp
import openai
import pytest
from live_cluster import LiveCluster

LITELLM = Path(sys.prefix) / "litellm"  # see the Makefile
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}
Body = dict[str, Any]
Read = Callable[[str, bool, Body], str]


def body_of(cluster: LiveCluster, is_chat: bool, stream: bool) -> Body:
    asked = "Write the word café and then a short poem about 東京 with emoji 🎉."
    prompt = {"messages": [{"role": "user", "content": asked}]} if is_chat else {"prompt": asked}
    shared = {"model": cluster.model, "max_tokens": 8, "temperature": 0.9, "seed": 7, "n": 1}
    return {**prompt, **shared, "stream": stream}


def text_of(chunks: Iterable[Body]) -> str:
    """Join what chunks or a whole answer say; exactly one finish reason."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["length"]
    return "".join(choice.get("text") or said_in(choice) for choice in choices)


def said_in(choice: Body) -> str:
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def text_of_events(lines: Iterable[str]) -> str:
    """Join the events of a stream that ends with [DONE]."""
    *events, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert done == "[DONE]"
    return text_of(json.loads(event) for event in events)


def read_by_openai(url: str, is_chat: bool, body: Body) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60) as client:
        create = cast(Any, client.chat.completions.create if is_chat else client.completions.create)
        answer = create(**body)
        return text_of(chunk.model_dump() for chunk in (answer if body["stream"] else [answer]))


def read_by_aiohttp(url: str, is_chat: bool, body: Body, by_line: bool) -> str:
    async def read() -> str:
        async with aiohttp.ClientSession() as session, session.post(url + PATHS[is_chat], json=body) as response:
            assert response.status == 200
            if not body["stream"]:
                return text_of([await response.json()])
            parts = [part async for part in (response.content if by_line else response.content.iter_any())]
            return text_of_events(b"".join(parts).decode().split("\n"))

    return asyncio.run(read())


def read_byte_by_byte(url: str, is_chat: bool, body: Body) -> str:
    """HTTP/1.1 by hand, one byte a read; chunked bodies are put together here."""
    data = json.dumps(body).encode()
    head = f"POST {PATHS[is_chat]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    received = bytearray()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
        while byte := connection.recv(1):
            received += byte
    answer, _, rest = bytes(received).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    if b"transfer-encoding: chunked" not in answer.lower():
        return text_of([json.loads(rest)])
    content = b""
    while (length := int(rest.partition(b"\r\n")[0], 16)) > 0:
        start = rest.index(b"\r\n") + 2
        content, rest = content + rest[start : start + length], rest[start + length + 2 :]
    assert rest == b"0\r\n\r\n"
    return text_of_events(content.decode().split("\n"))


CLIENTS: dict[str, Read] = {
    "openai": read_by_openai,
    "aiohttp, lines": lambda url, is_chat, body: read_by_aiohttp(url, is_chat, body, by_line=True),
    "aiohttp, chunks": lambda url, is_chat, body: read_by_aiohttp(url, is_chat, body, by_line=False),
    "socket, bytes": read_byte_by_byte,
}


def right_text(cluster: LiveCluster, is_chat: bool) -> str:
    response = cluster.client.post(PATHS[is_chat], json=body_of(cluster, is_chat, stream=False))
    assert response.status_code == 200, response.text
    return text_of([response.json()])


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completions"])
def test_every_client_reads_the_same(chat_cluster: LiveCluster, is_chat: bool) -> None:
    right = right_text(chat_cluster, is_chat)
    assert right
    for name, read in CLIENTS.items():
        for stream in (True, False):
            assert read(chat_cluster.url, is_chat, body_of(chat_cluster, is_chat, stream)) == right, (name, stream)


READ_BY_LITELLM = """
import json, sys
import litellm

url, is_chat, body = json.load(sys.stdin)
provider = "openai" if is_chat else "text-completion-openai"
ask = litellm.completion if is_chat else litellm.text_completion
body["model"] = f"{provider}/{body['model']}"
answer = ask(**body, api_base=url + "/v1", api_key="-", max_retries=0, timeout=60)
chunks = list(answer) if body["stream"] else [answer]
json.dump([chunk.model_dump() for chunk in chunks], sys.stdout, default=str)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completions"])
def test_litellm_reads_the_same(chat_cluster: LiveCluster, is_chat: bool) -> None:
    """In a process of its own, from a folder of its own: it is heavy and brings much with it."""
    if not LITELLM.is_dir() and os.environ.get("CI") != "true":
        pytest.skip("litellm is not installed; hint: make litellm")
    right = right_text(chat_cluster, is_chat)
    environment = {**os.environ, "PYTHONPATH": str(LITELLM), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    for stream in (True, False):
        given = json.dumps([chat_cluster.url, is_chat, body_of(chat_cluster, is_chat, stream)])
        command = [sys.executable, "-c", READ_BY_LITELLM]
        done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, timeout=110)
        assert done.returncode == 0, done.stderr[-2000:]
        assert text_of(json.loads(done.stdout)) == right, stream
