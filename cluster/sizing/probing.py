"""How the calibrator asks live workers for times: the interface; live_prober.py implements it over the admin socket."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from ..costs import Row


@dataclass(frozen=True)
class ProbedWorker:
    """One live worker, as it introduced itself."""

    name: str
    role: Literal["PROMPT", "COMPLETION"]
    host: str
    model: str
    fingerprint: str
    dtype: str
    engine: str  # "model" or "fake"
    kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True)
class RequestTimes:
    """One real request through the endpoint, timed by the client; the stages are the cluster's own (see metrics.py)."""

    ttft_s: float
    prefill_queue_s: float
    prefill_s: float


class Streams(Protocol):
    """Answers that are being streamed, each to a client of its own."""

    def gaps_s(self, min_num: int = 0) -> list[float]:
        """Return the gaps between tokens since the last call, of all streams, once there are so many."""
        ...


class Prober(Protocol):
    """Every method raises LaunchError when the cluster refuses: a worker is busy, has gone, or has no room."""

    def workers(self) -> list[ProbedWorker]: ...

    def time_passes(self, worker: str, rows: Sequence[Row], num_warmup: int, num_repeats: int) -> list[float]:
        """Return the seconds of `num_repeats` whole passes over `rows` on one worker, host time included.

        A row is (tokens cached before, tokens to compute); one new token on a cache is a decode row.
        """
        ...

    def time_transfers(self, prompt: str, completion: str, num_tokens: int, num_repeats: int) -> list[float]:
        """Return the seconds from the first byte of `num_tokens` of KV offered to the last byte confirmed."""
        ...

    def time_request(self, num_prompt_tokens: int) -> RequestTimes:
        """Send one streamed completion of two tokens to the endpoint."""
        ...

    def streams(self, num_streams: int) -> AbstractContextManager[Streams]:
        """Keep so many answers to short prompts streaming; they are cancelled at the end."""
        ...
