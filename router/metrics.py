"""What the router publishes to Prometheus, in a registry of its own; the definitions are those of cluster.metrics.

Request metrics are observed as requests end; what is known of workers and queue is read at scrape time (see
cluster_collector). Every label value comes from a closed set, worker names from the spec.
"""

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from .. import __version__
from ..cluster.metrics import STAGES, Timeline, inter_token_latencies_s, time_per_output_token_s
from .cluster_collector import ClusterCollector
from .generation import Backend
from .histogram import Histogram
from .job_record import FINISHED, JobRecord
from .openai.errors import FAILURE_API_CODE, FAILURE_STATUS
from .recent import RecentLatencies

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From a small model on a GPU (TTFT 10 ms, gaps of 2 ms) to a busy CPU (TTFT of seconds, gaps of 200 ms).
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
LATENCY_BUCKETS_S = (*SHORT_S, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 100, 300, 600)
STAGE_BUCKETS_S = (0.0001, 0.0003, *LATENCY_BUCKETS_S)
FAST_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1)
TOKEN_BUCKETS_S = (*FAST_S, 0.15, 0.2, 0.4, 0.8, 2, 5)

ENDPOINT_OF_PATH = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
GRAMMAR_OUTCOMES = ("known", "compiled", "refused", "timed_out")
UNMATCHED = "unmatched"  # the endpoint of all other paths: what clients invent makes no series
REJECTING = (401, 403, 429, 503, 504)  # statuses that say nothing against the request itself


class Metrics:
    """All metrics of one router process."""

    def __init__(self, backend: Backend, model_name: str) -> None:
        self.recent = RecentLatencies()
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"twinpool_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            made = Histogram(f"twinpool_{name}_seconds", text, bounds)
            registry.register(made)
            return made

        self._requests = counter("requests", "Requests by endpoint and how they ended.", "endpoint", "outcome")
        self._rejections = counter("rejections", "Requests turned away for no fault of theirs.", "reason")
        self.unknown_fields = counter("unknown_fields", "Fields of requests that are ignored.", "endpoint")
        self.grammars = counter("grammars", "Grammars that requests asked for, by how they compiled.", "outcome")
        self.running = Gauge(
            "twinpool_running_requests", "Accepted requests whose answer is not complete.", ["mode"], registry=registry
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens that needed no prefill.")
        self._output_tokens = counter("output_tokens", "Tokens generated for clients.")
        self._kv_bytes = counter("kv_bytes", "KV sent from PROMPT to COMPLETION workers.")
        self._kv_hidden_bytes = counter("kv_hidden_bytes", "KV that had arrived before its prefill ended.")
        self._ttft = histogram("time_to_first_token", "Accepted to first token sent.", LATENCY_BUCKETS_S)
        self._itl = histogram("inter_token_latency", "Each gap between two tokens.", TOKEN_BUCKETS_S)
        self._tpot = histogram("time_per_output_token", "(last - first token) / (tokens - 1).", TOKEN_BUCKETS_S)
        self._e2e = histogram("request", "Accepted to last token sent.", LATENCY_BUCKETS_S)
        stages = "The stages of a request; the first five add up to the time to the first token."
        self._stage = Histogram("twinpool_stage_seconds", stages, STAGE_BUCKETS_S, "stage", STAGES)
        registry.register(self._stage)
        build = Gauge("twinpool_build_info", "Always 1.", ["version", "model"], registry=registry)
        build.labels(__version__, model_name).set(1)
        for outcome in GRAMMAR_OUTCOMES:
            self.grammars.labels(outcome)
        for mode in ("stream", "whole"):
            self.running.labels(mode)
        for endpoint in ENDPOINT_OF_PATH.values():
            self._requests.labels(endpoint, FINISHED)
            self.unknown_fields.labels(endpoint)
        for code, status in FAILURE_STATUS.items():  # a series that begins at 1 hides its first rise
            if status in REJECTING:
                self._rejections.labels(FAILURE_API_CODE.get(code, code))
        self._cluster = ClusterCollector(backend, model_name)
        registry.register(self._cluster)

    def count(self, endpoint: str, outcome: str) -> None:
        """Count a request: `outcome` is FINISHED, CLIENT_LEFT or the code of the error that ended its stream."""
        self._requests.labels(endpoint, outcome).inc()

    def count_error(self, path: str, status: int, code: str) -> None:
        """Count a request that was answered with an error."""
        self.count(ENDPOINT_OF_PATH.get(path, UNMATCHED), code)
        if status in REJECTING:
            self._rejections.labels(code).inc()

    def observe(self, record: JobRecord) -> None:
        """Note the tokens of a request; latencies only if it ended well."""
        self.recent.observe(record)
        self._output_tokens.inc(record.num_output_tokens)
        if not record.is_finished:
            return
        for token_times_s in record.token_times_s.values():
            self._observe_tokens(record.accepted_s, token_times_s)
        for timeline in record.timelines.values():
            self._observe_timeline(timeline)

    async def exposition(self) -> bytes:
        """Return the page for Prometheus; written in a thread, because for 1,000 workers it takes a while."""
        self._cluster.look()
        return await asyncio.to_thread(generate_latest, self._registry)

    def _observe_tokens(self, accepted_s: float, token_times_s: list[float]) -> None:
        """By the router's clock: when the request was accepted, when each token was sent."""
        if not token_times_s:
            return
        self._ttft.observe([token_times_s[0] - accepted_s])
        self._e2e.observe([token_times_s[-1] - accepted_s])
        self._itl.observe(inter_token_latencies_s(token_times_s))
        tpot_s = time_per_output_token_s(token_times_s)
        if tpot_s is not None:
            self._tpot.observe([tpot_s])

    def _observe_timeline(self, timeline: Timeline) -> None:
        for stage, length_s in timeline.stages():
            self._stage.observe([length_s], stage)
        self._cached_tokens.inc(timeline.num_cached_tokens)
        self._kv_bytes.inc(timeline.num_kv_bytes)
        self._kv_hidden_bytes.inc(timeline.num_kv_bytes_arrived)
