"""Traces: what of a request becomes spans, and the context that a client sends. Knows no exporter (see otlp).

A request that ended is one span with a span below it for each stage of its choices, made from the Timeline at the end.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ..cluster.protocol.errors import ConfigError
from .job_record import CLIENT_LEFT, JobRecord

MAX_TRACED_CHOICES = 8  # more choices than these have no spans of their own
OPERATIONS = {"chat": "chat", "completions": "text_completion"}  # by the conventions for generative AI
TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Traces(Protocol):
    def record(self, record: JobRecord) -> None:
        """Take a request that ended, and return at once."""
        ...

    def close(self) -> None:
        """Send what is left, within a short limit."""
        ...


def connect_traces(endpoint: str) -> Traces:
    """Return traces that go to the collector at `endpoint`. Raises ConfigError without the extra `otel`."""
    try:
        from .otlp import OtlpTraces  # the one place that loads OpenTelemetry: most routers need none of it
    except ImportError as error:
        raise ConfigError(
            f"router.otlp_endpoint is {endpoint!r}, but OpenTelemetry is not installed ({error.name})",
            hint="pip install 'twinpool[otel]', or leave router.otlp_endpoint away",
        ) from error
    return OtlpTraces(endpoint)


@dataclass(frozen=True)
class TraceContext:
    """What a client's `traceparent` says, by W3C's Trace Context."""

    trace_id: str  # 32 hexadecimal digits
    parent_id: str  # 16
    is_sampled: bool


def parse_traceparent(header: str | None) -> TraceContext | None:
    """Return the context, None when there is no valid one: then a trace of its own begins."""
    match = TRACEPARENT.fullmatch(header.strip()) if header else None
    if match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    is_unknown = version == "ff" or (version == "00" and rest is not None)
    if is_unknown or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1))


@dataclass(frozen=True)
class StageSpan:
    """Times are the router's monotonic clock."""

    stage: str
    choice: int
    begin_s: float
    end_s: float


def stage_spans(record: JobRecord) -> Iterator[StageSpan]:
    """Yield the stages of the choices that ended well, one beginning where the last one ends."""
    for index in sorted(record.timelines)[:MAX_TRACED_CHOICES]:
        begin_s = record.accepted_s
        for stage, length_s in record.timelines[index].stages():
            end_s = min(begin_s + max(length_s, 0.0), record.ended_s)
            yield StageSpan(stage, index, begin_s, end_s)
            begin_s = end_s


def span_name(record: JobRecord) -> str:
    return f"{OPERATIONS[record.endpoint]} {record.model}"


def attributes_of(record: JobRecord) -> dict[str, Any]:
    """Return the request span's attributes: of the conventions for generative AI where they have one, else our own."""
    sampling, first = record.sampling, record.timelines.get(0)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS[record.endpoint],
        "gen_ai.provider.name": "twinpool",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "twinpool.request_id": record.request_id,
        "twinpool.outcome": record.outcome,
    }
    if len(record.token_times_s) > 1:
        attributes["gen_ai.request.choice.count"] = len(record.token_times_s)
    if sampling is not None:
        attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.seed": sampling.seed,
        }
    if first is not None:
        attributes |= {
            "gen_ai.usage.cache_read.input_tokens": first.num_cached_tokens,
            "twinpool.num_attempts": first.num_attempts,
            "twinpool.num_preemptions": first.num_preemptions,
            "twinpool.num_kv_bytes": first.num_kv_bytes,
            "twinpool.num_kv_bytes_arrived": first.num_kv_bytes_arrived,
        }
    if is_error(record):
        attributes["error.type"] = record.outcome
    return attributes


def is_error(record: JobRecord) -> bool:
    """A client that left is no error of ours."""
    return not record.is_finished and record.outcome != CLIENT_LEFT
