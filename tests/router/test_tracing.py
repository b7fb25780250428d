"""Traces: the context that comes in, the spans that go out to a collector, and that it may be absent or dead."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from otlp_collector import Collector, attributes
from twinpool.cluster.metrics import STAGES, Timeline
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.router import otlp
from twinpool.router.app import create_app
from twinpool.router.generation import GenerationFailed
from twinpool.router.job_record import JobRecord
from twinpool.router.otlp import OtlpTraces
from twinpool.router.tracing import TraceContext, Traces, connect_traces, parse_traceparent, stage_spans

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "do not tell"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def timeline(say: Callable[..., Any]) -> Timeline:
    return say("a")[-1].timeline


@pytest.fixture
def ask(backend: Any, tokenizer: Any) -> Callable[..., httpx.Response]:
    """Send one request to an application with these traces; what they hold has been sent when it returns."""

    def send(traces: Traces, body: dict[str, Any], **headers: str) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(create_app(backend, tokenizer, "tiny", traces=traces))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                return await client.post("/v1/completions", json=body, headers=headers)

        response = asyncio.run(once())
        traces.close()
        return response

    return send


@pytest.mark.parametrize(
    ("header", "context"),
    [
        (f"00-{TRACE_ID}-{PARENT_ID}-01", TraceContext(TRACE_ID, PARENT_ID, True)),
        (f"00-{TRACE_ID}-{PARENT_ID}-00", TraceContext(TRACE_ID, PARENT_ID, False)),
        (f"cc-{TRACE_ID}-{PARENT_ID}-01-what-is-to-come", TraceContext(TRACE_ID, PARENT_ID, True)),
        (None, None),
        ("", None),
        ("nonsense", None),
        (f"00-{TRACE_ID}-{PARENT_ID}", None),
        (f"00-{TRACE_ID}-{PARENT_ID}-01-more", None),
        (f"ff-{TRACE_ID}-{PARENT_ID}-01", None),
        (f"00-{TRACE_ID.upper()}-{PARENT_ID}-01", None),
        (f"00-{'0' * 32}-{PARENT_ID}-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
    ],
)
def test_the_context_of_a_client(header: str | None, context: TraceContext | None) -> None:
    """By W3C's Trace Context: later versions may say more, an invalid one counts as none."""
    assert parse_traceparent(header) == context


def test_a_request_is_one_span_with_its_stages_below(collector: Collector, ask: Callable[..., Any]) -> None:
    """The stages nest in the request's span and join without gaps; the trace is the client's; no text leaves."""
    body = {"prompt": SECRET, "max_tokens": 20, "temperature": 0.5, "seed": 3}
    ask(OtlpTraces(collector.url + "/"), body, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
    root = collector.root
    assert collector.paths == {"/v1/traces"}
    assert collector.resource["service.name"] == "twinpool"
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert root.name == "text_completion tiny"
    stages = sorted((span for span in collector.spans if span is not root), key=lambda span: span.start_time_unix_nano)
    assert {span.name for span in stages} == set(STAGES)
    assert {(span.trace_id, span.parent_span_id) for span in stages} == {(root.trace_id, root.span_id)}
    ends = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in stages)]
    assert [span.start_time_unix_nano for span in stages] == ends[:-1]
    assert ends[-1] <= root.end_time_unix_nano
    shown = attributes(root)
    expected = {"max_tokens": 20, "temperature": 0.5, "seed": 3, "model": "tiny"}
    assert {name: shown[f"gen_ai.request.{name}"] for name in expected} == expected
    assert shown["gen_ai.operation.name"] == "text_completion"
    assert shown["gen_ai.usage.output_tokens"] > 0
    assert shown["twinpool.outcome"] == "finished"
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert not any(SECRET in str(span) or "hello" in str(span) for span in collector.spans), "text leaks"


def test_stages_are_as_long_as_the_timeline_says(timeline: Timeline) -> None:
    """They add up to the request; a choice that ended badly has none."""
    record = JobRecord("r", "chat", "m", "finished", 100.0, 100.0 + timeline.end_s, 8, 3, {0: [], 1: []}, {0: timeline})
    spans = list(stage_spans(record))
    assert [(span.stage, span.choice) for span in spans] == [(stage, 0) for stage in STAGES]
    assert [span.end_s - span.begin_s for span in spans] == pytest.approx([s for _, s in timeline.stages()])
    assert (spans[0].begin_s, spans[-1].end_s) == (100.0, pytest.approx(record.ended_s))


def test_every_choice_has_its_stages(collector: Collector, ask: Callable[..., Any]) -> None:
    ask(OtlpTraces(collector.url), {"prompt": "hi", "n": 2})
    choices = [attributes(span).get("twinpool.choice") for span in collector.spans if span is not collector.root]
    assert choices.count(0) == choices.count(1) > 0
    assert attributes(collector.root)["gen_ai.request.choice.count"] == 2
    assert not collector.root.parent_span_id, "without a context of the client's a trace begins here"


def test_a_request_that_failed_says_how(collector: Collector, ask: Callable[..., Any], backend: Any) -> None:
    backend.script = lambda request: [GenerationFailed("worker_failed", "It died.")]
    assert ask(OtlpTraces(collector.url), {"prompt": SECRET}).status_code == 502
    assert collector.spans == [collector.root]
    assert collector.root.status.code == Status.STATUS_CODE_ERROR
    assert attributes(collector.root)["error.type"] == "worker_failed"


def test_what_the_client_does_not_sample_is_not_sent(collector: Collector, ask: Callable[..., Any]) -> None:
    ask(OtlpTraces(collector.url), {"prompt": "hi"}, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")
    assert collector.spans == []


@pytest.mark.parametrize(("header", "shown"), [(f"00-{TRACE_ID}-{PARENT_ID}-00", TRACE_ID), ("nonsense", "")])
def test_the_log_names_the_trace_of_the_client(
    call: Any, caplog: pytest.LogCaptureFixture, header: str, shown: str
) -> None:
    """Without a collector, too, and sampled or not: that is how a line is found from a client's trace."""
    caplog.set_level("INFO", "twinpool.router.request_log")
    call("POST", "/v1/completions", json={"prompt": "hi"}, headers={"traceparent": header})
    (line,) = [line for line in caplog.records if line.name == "twinpool.router.request_log"]
    assert vars(line)["trace_id"] == shown
    assert (f"trace_id={shown}" in line.getMessage()) == bool(shown)
    assert "nonsense" not in line.getMessage()


def test_a_dead_collector_breaks_nothing(ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there: the answer is the same, and closing does not wait for ever."""
    monkeypatch.setattr(otlp, "CLOSE_LIMIT_S", 0.05)
    assert ask(OtlpTraces("http://127.0.0.1:9"), {"prompt": "hi"}).status_code == 200


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "twinpool.router.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"(?s)not installed.*hint: pip install 'twinpool\[otel\]'"):
        connect_traces("http://127.0.0.1:4318")


def test_opentelemetry_is_loaded_only_when_asked_for() -> None:
    """A router without a collector neither needs the extra nor pays for it."""
    code = "import sys, twinpool.router.__main__; print([m for m in sys.modules if m.startswith(PARTS)])"
    code = f"PARTS = ('opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto'); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
