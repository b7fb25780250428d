"""Answers that a running cluster streams while something else is timed: threads that read tokens and note the gaps."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx

from ..protocol.errors import LaunchError

Open = Callable[[], AbstractContextManager[httpx.Response]]  # sends one streamed request
PATIENCE_S = 60.0  # for the gaps that were asked for
TICK_S = 0.02


class LiveStreams:
    """Implements probing.Streams. A stream that comes to its end is begun anew."""

    def __init__(self, num_streams: int, open_stream: Open) -> None:
        self._open = open_stream
        self._lock = threading.Lock()
        self._gaps_s: list[float] = []
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_streams)]

    def __enter__(self) -> "LiveStreams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def gaps_s(self, min_num: int = 0) -> list[float]:
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            with self._lock:
                if self._failure is not None:
                    raise LaunchError(f"a stream ended in mid-measurement: {self._failure}") from self._failure
                if len(self._gaps_s) >= min_num:
                    gaps_s, self._gaps_s = self._gaps_s, []
                    return gaps_s
                num_seen = len(self._gaps_s)
            if time.monotonic() >= give_up_s:
                raise LaunchError(f"the streams sent {num_seen} tokens in {PATIENCE_S:g} s, {min_num} were awaited")
            time.sleep(TICK_S)

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                with self._open() as response:
                    self._read(response)
        except Exception as error:  # for the thread that asks for gaps
            with self._lock:
                self._failure = error

    def _read(self, response: httpx.Response) -> None:
        last_s: float | None = None
        if response.status_code != 200:
            raise LaunchError(f"HTTP status {response.status_code}: {response.read().decode(errors='replace')[:300]}")
        for line in response.iter_lines():
            if self._is_over.is_set():
                return
            if not _has_tokens(line):
                continue
            now = time.monotonic()
            if last_s is not None:
                with self._lock:
                    self._gaps_s.append(now - last_s)
            last_s = now


def _has_tokens(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise LaunchError(str(chunk["error"].get("message")))
    return any(choice.get("token_ids") for choice in chunk.get("choices", ()))
