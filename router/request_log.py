"""One line for each request that ended: who asked, what it came to, how long it took. No text of prompt or answer."""

import logging
from dataclasses import dataclass

from .job_record import JobRecord
from .tracing import parse_traceparent

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndedRequest:
    """Its fields are those of a JSON line, and in a line of text they stand as name=value."""

    request_id: str
    endpoint: str
    outcome: str
    caller: str
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    duration_s: float
    trace_id: str  # by which the client's tracing knows it; empty when it sent no context


def log_ended(record: JobRecord, caller: str) -> None:
    """Log an accepted request's end."""
    first_s = min((times_s[0] for times_s in record.token_times_s.values() if times_s), default=None)
    ended = EndedRequest(
        record.request_id,
        record.endpoint,
        record.outcome,
        caller,
        record.num_prompt_tokens,
        record.num_output_tokens,
        round(first_s - record.accepted_s, 4) if first_s is not None else None,
        round(record.ended_s - record.accepted_s, 4),
        context.trace_id if (context := parse_traceparent(record.traceparent)) else "",
    )
    fields = dict(vars(ended))
    shown = " ".join(
        f"{name}={_plain(value)}" for name, value in fields.items() if name != "request_id" and value != ""
    )
    log.info("request %s: %s", record.request_id, shown, extra=fields)


def _plain(value: object) -> str:
    """Return a value as it may stand in a line: without keys a caller's name is the client's own word."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


def log_refused(request_id: str, status: int, code: str, caller: str) -> None:
    """Log a request that was answered with an error before it was accepted."""
    fields = {"request_id": request_id, "status": status, "code": code, "caller": caller}
    log.info("request %s: refused, %d %s", request_id, status, code, extra=fields)
