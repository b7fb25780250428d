"""The definitions of TTFT, TPOT, ITL and of the stages a request passes; in one place.

TTFT: accepted to first token sent. TPOT: (last - first) / (n - 1), undefined for one token. ITL: each gap.
The stages before the first token add up to the TTFT (I5): four are measured, each by one process's clock alone, and
`return_s` is what the router saw beyond them (messages on their way). After it come the transfer (the KV that the
prefill did not hide), the first decode step and the decoding of the rest; with them the stages add up to the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

STAGES = ("queue", "grant", "prefill_queue", "prefill", "return", "transfer", "first_decode", "decode")


@dataclass(frozen=True)
class Timeline:
    """Where one request's time went, seconds. `queue_s` includes everything before the attempt that succeeded."""

    queue_s: float  # accepted → grant asked for
    grant_s: float  # grant asked for → granted, prefill sent
    prefill_queue_s: float  # PROMPT worker received it → first chunk starts
    prefill_s: float  # first chunk starts → first token sampled
    return_s: float  # the rest until the router sent the first token on
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_attempts: int
    num_preemptions: int
    num_kv_bytes: int
    num_kv_bytes_arrived: int  # of these, verified by the COMPLETION worker before the prefill's last layer ended
    last_kv_s: float | None  # first token sent → last KV byte verified; negative: it was there before
    second_token_s: float | None  # first token sent → second token sent
    end_s: float  # accepted → terminal event

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.grant_s + self.prefill_queue_s + self.prefill_s + self.return_s

    @property
    def transfer_s(self) -> float | None:
        """First token sent → last KV byte verified, 0 when it was there before; None when there is no second token."""
        if self.second_token_s is None:
            return None
        return min(max(self.last_kv_s or 0.0, 0.0), self.second_token_s)

    @property
    def first_decode_s(self) -> float | None:
        """The rest until the second token was sent: the step that made it, and its way."""
        return None if self.second_token_s is None else self.second_token_s - (self.transfer_s or 0.0)

    @property
    def decode_s(self) -> float | None:
        """Second token sent → end."""
        return None if self.second_token_s is None else self.end_s - self.ttft_s - self.second_token_s

    def stages(self) -> list[tuple[str, float]]:
        """Return each stage of STAGES that the request had, with its seconds: one begins where the last one ends."""
        lengths = [(name, getattr(self, f"{name}_s")) for name in STAGES]
        return [(name, length_s) for name, length_s in lengths if length_s is not None]

    @property
    def kv_share_hidden(self) -> float | None:
        """Share of the KV bytes that arrived while the prefill was still running; None when nothing was sent."""
        return self.num_kv_bytes_arrived / self.num_kv_bytes if self.num_kv_bytes else None


def time_per_output_token_s(token_times_s: Sequence[float]) -> float | None:
    """TPOT of one request from the times its tokens were sent; None for fewer than two tokens."""
    if len(token_times_s) < 2:
        return None
    return (token_times_s[-1] - token_times_s[0]) / (len(token_times_s) - 1)


def inter_token_latencies_s(token_times_s: Sequence[float]) -> list[float]:
    """Each gap between consecutive tokens."""
    return [later - earlier for earlier, later in pairwise(token_times_s)]
