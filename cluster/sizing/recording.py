"""A live run as it was seen by its client: every request's token times and stages, and the cluster it ran on.

A recording is a JSONL file that `read_trace` reads too: one header, then a line a request with its arrival and lengths;
beside them `runs` holds what happened to it each time that the same arrivals were sent. Knows no HTTP; record.py does.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..metrics import inter_token_latencies_s
from ..protocol.errors import ConfigError
from .probing import ProbedWorker
from .result import Outcome, Run
from .units import counted
from .workload import Request

FORMAT = "twinpool-recording/1"
HINT = "`twinpool validate --record FILE` writes recordings"
GAP_DIGITS = 6  # gaps are counted by their length in microseconds
BEFORE_PREFILL = ("queue_s", "grant_s", "prefill_queue_s")


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


P = TypeVar("P", bound=Part)


class Sighting(Part):
    """One request in one run; seconds from the run's start on the client's clock."""

    sent_s: float
    token_times_s: tuple[float, ...] = ()
    timing: dict[str, float | None] = Field(default_factory=dict)  # the cluster's own, see docs/api.md
    error: str | None = None

    def count(self, key: str) -> int | None:
        """Return what the cluster counted, such as num_attempts; None when it said nothing."""
        value = self.timing.get(key)
        return None if value is None else round(value)


class RecordedRequest(Part):
    request_id: str
    arrival_s: float
    num_prompt_tokens: int = Field(ge=1)
    num_output_tokens: int = Field(ge=1)
    runs: tuple[Sighting, ...] = Field(min_length=1)

    @property
    def request(self) -> Request:
        return Request(self.request_id, self.arrival_s, self.num_prompt_tokens, self.num_output_tokens)


class Header(Part):
    """`client_cpu_shares` has one number a run: the part of one core that the load generator itself took."""

    format: Literal["twinpool-recording/1"] = FORMAT
    policy: Literal["disaggregated"] = "disaggregated"
    workers: tuple[ProbedWorker, ...]
    client_cpu_shares: tuple[float, ...] = Field(min_length=1)
    max_late_s: float  # how far it fell behind the arrivals, at worst


@dataclass(frozen=True)
class LiveRun:
    """One time that the arrivals were sent: what became of each request, in their order."""

    sightings: list[Sighting]
    client_cpu_share: float
    max_late_s: float  # how far the generator fell behind, at worst


@dataclass(frozen=True)
class Recording:
    header: Header
    requests: list[RecordedRequest] = field(repr=False)

    @property
    def num_runs(self) -> int:
        return len(self.header.client_cpu_shares)

    def sent(self, run: int) -> list[Request]:
        """Return the requests with the times at which they really left in that run."""
        return [
            Request(r.request_id, r.runs[run].sent_s, r.num_prompt_tokens, r.num_output_tokens) for r in self.requests
        ]

    def as_run(self, run: int) -> Run:
        """Describe one live run as the simulator describes its own."""
        outcomes = [_outcome(request, r.runs[run]) for request, r in zip(self.sent(run), self.requests, strict=True)]
        gaps: Counter[float] = Counter()
        for recorded in self.requests:
            latencies = inter_token_latencies_s(recorded.runs[run].token_times_s)
            gaps.update(round(gap_s, GAP_DIGITS) for gap_s in latencies)
        end_s = max((outcome.last_token_s or 0.0 for outcome in outcomes), default=0.0)
        return Run("live", outcomes, dict(sorted(gaps.items())), len(self.header.workers), end_s)

    def save(self, path: Path) -> None:
        """Write the file. Raises ConfigError when that is impossible."""
        lines = [part.model_dump_json() for part in (self.header, *self.requests)]
        try:
            path.write_text("\n".join(lines) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write the recording {path}: {error.strerror}") from error


def join_runs(workers: Sequence[ProbedWorker], requests: Sequence[Request], runs: Sequence[LiveRun]) -> Recording:
    """Put the runs of the same requests together."""
    header = Header(
        workers=tuple(workers),
        client_cpu_shares=tuple(run.client_cpu_share for run in runs),
        max_late_s=max(run.max_late_s for run in runs),
    )
    columns = zip(*(run.sightings for run in runs), strict=True)
    recorded = [
        RecordedRequest(
            request_id=request.request_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            runs=sightings,
        )
        for request, sightings in zip(requests, columns, strict=True)
    ]
    return Recording(header, recorded)


def load_recording(path: Path) -> Recording:
    """Read a recording. Raises ConfigError naming the line and the key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the recording {path}: {error.strerror}", hint=HINT) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no recording: it is not a text in UTF-8", hint=HINT) from error
    if len(lines) < 2:
        raise ConfigError(f"{path} holds no recording: {counted(len(lines), 'line')}", hint=HINT)
    header = _parse(Header, lines[0], f"{path}:1")
    requests = [_parse(RecordedRequest, line, f"{path}:{number}") for number, line in enumerate(lines[1:], 2)]
    num_runs = len(header.client_cpu_shares)
    for number, request in enumerate(requests, 2):
        if len(request.runs) != num_runs:
            raise ConfigError(f"{path}:{number}: runs: {len(request.runs)} instead of the header's {num_runs}")
    return Recording(header, requests)


def _parse(kind: type[P], line: str, where: str) -> P:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) + ": " if first["loc"] else ""
        raise ConfigError(
            f"{where} is not a recording's {kind.__name__.lower()}: {key}{first['msg']}",
            hint=HINT,
        ) from error


def _outcome(request: Request, seen: Sighting) -> Outcome:
    times = seen.token_times_s
    outcome = Outcome(request, num_tokens=len(times), refused=seen.error)
    outcome.is_finished = seen.error is None and len(times) == request.num_output_tokens
    if times:
        outcome.first_token_s, outcome.last_token_s = times[0], times[-1]
        outcome.max_gap_s = max(inter_token_latencies_s(times), default=0.0)
    if seen.timing:
        stage = {key: value or 0.0 for key, value in seen.timing.items()}
        outcome.prefill_start_s = request.arrival_s + sum(stage[key] for key in BEFORE_PREFILL)
        outcome.prefill_end_s = outcome.prefill_start_s + stage["prefill_s"]
        outcome.num_preemptions = round(stage["num_preemptions"])
        if times and seen.timing["last_kv_s"] is not None:
            outcome.transfer_end_s = times[0] + stage["last_kv_s"]
    return outcome
