"""Asks a running cluster for times: passes and transfers through the router's admin socket, requests as a client would.

Any thread may call it, so that several probes run at a time on different workers. Passes and transfers are timed by the
workers themselves, a request here.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any, Self

import httpx

from ..client_key import KEY_HINT, key_headers
from ..costs import Row
from ..protocol.errors import LaunchError
from .live_streams import LiveStreams
from .probing import ProbedWorker, RequestTimes

BUSY_PATIENCE_S = 3.0  # a worker that has just ended its last request may hold on to it for a moment
BUSY_PAUSE_S = 0.02
STREAM_PROMPT_TOKENS = 64
ANSWER_S = 30.0  # more than the router takes beyond the limit it was given
TOKEN_IDS = (64, 256)  # every vocabulary has these, and they seldom mean anything special
HINTS = {
    "worker_busy": "let nothing else use the cluster meanwhile; `twinpool status` shows its load",
    "probe_refused": "`twinpool status` shows the workers; their limits are in the cluster's spec",
}


class LiveProber:
    """Implements probing.Prober on a cluster's admin socket, its endpoint and the name of the model it serves."""

    def __init__(self, admin_socket: Path, url: str, model: str, limit_s: float = 120.0) -> None:
        """No single probe takes longer than `limit_s`."""
        self._model = model
        self._limit_s = limit_s
        transport = httpx.HTTPTransport(uds=str(admin_socket))
        timeout = httpx.Timeout(limit_s + ANSWER_S, connect=5.0)
        self._admin = httpx.Client(transport=transport, base_url="http://router", timeout=timeout)
        self._http = httpx.Client(base_url=url, headers=key_headers(), trust_env=False, timeout=timeout)
        self._random = Random()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._admin.close()
        self._http.close()

    def workers(self) -> list[ProbedWorker]:
        found = self._send("GET", "/status").json()["workers"]
        return [ProbedWorker(**{field.name: worker[field.name] for field in fields(ProbedWorker)}) for worker in found]

    def time_passes(self, worker: str, rows: Sequence[Row], num_warmup: int, num_repeats: int) -> list[float]:
        question = {"worker": worker, "rows": rows, "num_warmup": num_warmup, "num_repeats": num_repeats}
        return self._probe("/probe/passes", question)["pass_s"]

    def time_transfers(self, prompt: str, completion: str, num_tokens: int, num_repeats: int) -> list[float]:
        """As in Prober; one more goes before them and does not count: it may have to open the connection."""
        question = {"prompt": prompt, "completion": completion, "num_tokens": num_tokens}
        times_s = [self._probe("/probe/transfer", question)["transfer_s"] for _ in range(num_repeats + 1)]
        return times_s[1:]

    def streams(self, num_streams: int) -> LiveStreams:
        room = min(worker.max_model_len for worker in self.workers()) - STREAM_PROMPT_TOKENS
        return LiveStreams(num_streams, lambda: self._stream(STREAM_PROMPT_TOKENS, max(2, room // 2)))

    def time_request(self, num_prompt_tokens: int) -> RequestTimes:
        first_s, timing = None, None
        began_s = time.monotonic()
        try:
            with self._stream(num_prompt_tokens, num_output_tokens=2) as response:
                for chunk in _chunks(response):
                    if first_s is None and any(choice.get("token_ids") for choice in chunk["choices"]):
                        first_s = time.monotonic()
                    timing = chunk.get("timing", timing)
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        if first_s is None or timing is None:
            raise LaunchError("the stream of a timed request ended before its timing came", hint="see the router's log")
        return RequestTimes(first_s - began_s, timing["prefill_queue_s"], timing["prefill_s"])

    def _stream(self, num_prompt_tokens: int, num_output_tokens: int) -> AbstractContextManager[httpx.Response]:
        """Send a completion whose prompt is in no cache; its answer comes as a stream."""
        prompt = [self._random.randrange(*TOKEN_IDS) for _ in range(num_prompt_tokens)]
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": num_output_tokens}
        body |= {"temperature": 0.0, "stream": True, "timing": True, "ignore_eos": True, "return_token_ids": True}
        return self._http.stream("POST", "/v1/completions", json=body)

    def _probe(self, path: str, question: dict[str, Any]) -> dict[str, Any]:
        """Ask; again and again for a while when a worker is just busy."""
        give_up_s = time.monotonic() + BUSY_PATIENCE_S
        while True:
            response = self._send("POST", path, {**question, "limit_s": self._limit_s})
            if response.status_code == 200:
                return response.json()
            error = _error_of(response)
            code = str(error.get("code"))
            if code != "worker_busy" or time.monotonic() >= give_up_s:
                raise LaunchError(f"the cluster gave no times: {error.get('message')}", hint=HINTS.get(code))
            time.sleep(BUSY_PAUSE_S)

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self._admin.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise _unreachable(error) from error


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield a stream's chunks. Raises LaunchError for an answer that is, or becomes, an error."""
    if response.status_code != 200:
        response.read()
        hint = KEY_HINT if response.status_code == 401 else None
        raise LaunchError(f"the cluster refused a timed request: {_error_of(response).get('message')}", hint=hint)
    for line in response.iter_lines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise LaunchError(f"a timed request failed: {chunk['error']['message']}")
            yield chunk


def _error_of(response: httpx.Response) -> dict[str, Any]:
    try:
        return response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": f"HTTP status {response.status_code}"}


def _unreachable(error: httpx.HTTPError) -> LaunchError:
    return LaunchError(
        f"the router does not answer: {error or type(error).__name__}", hint="`twinpool status` shows whether it runs"
    )
