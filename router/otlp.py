"""Sends traces to an OpenTelemetry collector by OTLP over HTTP. Loaded only when the spec names a collector.

A background thread exports batches from a bounded queue: a collector that is slow or dead costs spans, never a request.
"""

import threading
import time

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from .. import __version__
from .job_record import JobRecord
from .tracing import attributes_of, is_error, parse_traceparent, span_name, stage_spans

EXPORT_TIMEOUT_S = 5.0
CLOSE_LIMIT_S = 2.0


class OtlpTraces:
    """Implements router.tracing.Traces. OpenTelemetry's own `OTEL_…` variables set headers, sampling and batches."""

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({"service.name": "twinpool", "service.version": __version__})
        # What the operator's environment says of the service wins over ours.
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twinpool.router", __version__)

    def record(self, record: JobRecord) -> None:
        wall_ns = time.time_ns() - time.monotonic_ns()  # the record's clock has another zero

        def at(monotonic_s: float) -> int:
            return wall_ns + round(monotonic_s * 1e9)

        span = self._tracer.start_span(
            span_name(record),
            _context_of(record),
            SpanKind.SERVER,
            attributes_of(record),
            start_time=at(record.accepted_s),
        )
        if is_error(record):
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        below = set_span_in_context(span)
        for stage in stage_spans(record):
            child = self._tracer.start_span(
                stage.stage, below, attributes={"twinpool.choice": stage.choice}, start_time=at(stage.begin_s)
            )
            child.end(at(stage.end_s))
        span.end(at(record.ended_s))

    def close(self) -> None:
        # The provider would wait for a dead collector for much longer, and takes no limit.
        closing = threading.Thread(target=self._provider.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_LIMIT_S)


def _context_of(record: JobRecord) -> Context | None:
    caller = parse_traceparent(record.traceparent)
    if caller is None:
        return None
    parent = SpanContext(
        int(caller.trace_id, 16), int(caller.parent_id, 16), is_remote=True, trace_flags=TraceFlags(caller.is_sampled)
    )
    return set_span_in_context(NonRecordingSpan(parent))
