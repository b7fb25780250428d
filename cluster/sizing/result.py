"""What a simulated (or recorded) run was: every request's times, every gap between tokens, every pass.

Knows neither policies nor costs, so that a live run can be described in the same terms (see validate.py).
"""

from dataclasses import dataclass, field
from typing import Literal

from .workload import Request

Policy = Literal["shared", "chunked", "disaggregated", "auto"]
BarKind = Literal["prefill", "decode", "fused", "transfer"]


@dataclass(frozen=True, slots=True)
class Bar:
    """What one resource did without a break: one pass, or consecutive decode steps of the same sequences."""

    resource: str  # a worker ("prompt-0", "completion-1", "normal-0") or a link ("prompt-0→completion-1")
    kind: BarKind
    start_s: float
    end_s: float
    num_passes: int
    num_prefill_tokens: int  # over all its passes
    num_decode_tokens: int  # over all its passes
    request_ids: tuple[str, ...]

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(slots=True)
class Outcome:
    """One request's life. A time is None when that did not happen before the run's end; all are absolute."""

    request: Request
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    transfer_end_s: float | None = None  # the KV is where the sequence decodes
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0  # sent so far
    max_gap_s: float = 0.0
    num_preemptions: int = 0
    is_finished: bool = False
    refused: str | None = None  # why it was not even accepted

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (n - 1); None for a single token."""
        if self.first_token_s is None or self.last_token_s is None or self.num_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        if not self.is_finished or self.last_token_s is None:
            return None
        return self.last_token_s - self.request.arrival_s


@dataclass
class Run:
    """A whole run. `gaps` counts every gap between two tokens of one request (ITL), by its length in seconds."""

    policy: str
    outcomes: list[Outcome]
    gaps: dict[float, int]
    num_workers: int
    end_s: float
    bars: list[Bar] = field(default_factory=list[Bar])  # empty when the run was told not to keep them
    busy_s: dict[str, float] = field(default_factory=dict[str, float])  # of each resource, links included

    @property
    def gpu_s(self) -> float:
        """Busy seconds of all resources, transfers included: what the bars add up to."""
        return sum(self.busy_s.values())
