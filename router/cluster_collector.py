"""Gauges and counters of workers, queue and attempts, from `backend.status()` at the moment of the scrape.

No worker is asked: the router knows their last reports. A worker that is gone has no series.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .generation import Backend

Worker = Mapping[str, Any]

WORKER_GAUGES = {  # field of the worker's Load → name, meaning
    "num_blocks": ("twinpool_worker_blocks", "KV blocks of the worker."),
    "num_free_blocks": ("twinpool_worker_free_blocks", "KV blocks that are free."),
    "num_cached_blocks": ("twinpool_worker_cached_blocks", "KV blocks that hold a cached prefix and may be reused."),
    "num_granted_blocks": ("twinpool_worker_granted_blocks", "KV blocks reserved for KV that is to arrive."),
    "num_queued_tokens": ("twinpool_worker_queued_tokens", "Prompt tokens to compute."),
    "num_sequences": ("twinpool_worker_sequences", "Sequences in the engine."),
    "num_transfers": ("twinpool_worker_transfers", "KV transfers that are open."),
}
WORKER_COUNTERS = {
    "num_dropped_frames": ("twinpool_worker_dropped_frames", "Late, duplicate or corrupt frames of KV."),
}
TROUBLE_COUNTERS = {  # field of status()["counts"] → name, meaning
    "num_retries": ("twinpool_retries", "Attempts that failed and were followed by another."),
    "num_preemptions": ("twinpool_preemptions", "Sequences handed back for want of KV blocks."),
    "num_busy": ("twinpool_busy_grants", "Grants that a COMPLETION worker had no room for."),
}


class ClusterCollector(Collector):
    def __init__(self, backend: Backend, model_name: str) -> None:
        self._backend = backend
        self._model_name = model_name
        self._status: Mapping[str, Any] = {}

    def look(self) -> None:
        """Take what the next page shows; in the loop, whose the backend is."""
        self._status = self._backend.status()

    def collect(self) -> Iterator[Metric]:
        status = self._status
        workers: list[Worker] = status.get("workers", [])
        reporting = _reporting(workers)
        yield _count_by_state(workers)
        for field, (name, text) in WORKER_GAUGES.items():
            yield _of_workers(GaugeMetricFamily(name, text, labels=["worker", "role"]), reporting, field)
        for field, (name, text) in WORKER_COUNTERS.items():
            yield _of_workers(CounterMetricFamily(name, text, labels=["worker", "role"]), reporting, field)
        yield _kv_usage(reporting)
        yield from _of_router(status)
        yield from self._for_gateways(status, reporting)

    def _for_gateways(self, status: Mapping[str, Any], reporting: list[Worker]) -> Iterator[Metric]:
        """The gauges by which gateways balance between model servers, under the names that they look for."""
        completions = [worker for worker in reporting if worker["role"] == "COMPLETION"]
        gauges: Iterable[tuple[str, str, float]] = (
            ("vllm:num_requests_waiting", "Same as twinpool_queued_requests.", status.get("queued", 0)),
            ("vllm:num_requests_running", "Requests that have a pair of workers.", status.get("running", 0)),
            ("vllm:kv_cache_usage_perc", "Used share, 0 to 1, of the COMPLETION pool's KV blocks.", _used(completions)),
        )
        for name, text, value in gauges:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family


def _reporting(workers: Iterable[Worker]) -> list[Worker]:
    """Return the workers that have sent a report; of two incarnations of a name the last."""
    return list({str(worker["name"]): worker for worker in workers if worker["load"] is not None}.values())


def _count_by_state(workers: Iterable[Worker]) -> Metric:
    counts = {(role, state): 0 for role in ("PROMPT", "COMPLETION") for state in ("alive", "suspect")}
    for worker in workers:
        key = (str(worker["role"]), str(worker["state"]))
        counts[key] = counts.get(key, 0) + 1
    family = GaugeMetricFamily("twinpool_workers", "Known workers by role and state.", labels=["role", "state"])
    for key, count in counts.items():
        family.add_metric(key, count)
    return family


def _of_workers(
    family: GaugeMetricFamily | CounterMetricFamily, reporting: Iterable[Worker], field: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for worker in reporting:
        family.add_metric([str(worker["name"]), str(worker["role"])], worker["load"][field])
    return family


def _kv_usage(reporting: list[Worker]) -> Metric:
    family = GaugeMetricFamily("twinpool_kv_usage_ratio", "Used share of a pool's KV blocks, 0 to 1.", labels=["role"])
    for role in ("PROMPT", "COMPLETION"):
        family.add_metric([role], _used([worker for worker in reporting if worker["role"] == role]))
    return family


def _used(workers: Iterable[Worker]) -> float:
    """Return the share of the blocks that are neither free nor reusable."""
    loads: list[Mapping[str, int]] = [worker["load"] for worker in workers]
    total = sum(load["num_blocks"] for load in loads)
    idle = sum(load["num_free_blocks"] + load["num_cached_blocks"] for load in loads)
    return (total - idle) / total if total else 0.0


def _of_router(status: Mapping[str, Any]) -> Iterator[Metric]:
    gauges = (
        ("twinpool_queued_requests", "Accepted requests that wait for a pair of workers.", "queued"),
        ("twinpool_queued_tokens", "Tokens that these have to prefill.", "queued_tokens"),
        ("twinpool_event_loop_lag_seconds", "Largest lateness of the router's loop in the last 15 s.", "loop_lag_s"),
    )
    for name, text, field in gauges:
        yield GaugeMetricFamily(name, text, value=status.get(field, 0))
    limits = GaugeMetricFamily("twinpool_limit", "What bounds the router's queue and attempts.", labels=["limit"])
    for name, value in status.get("limits", {}).items():
        limits.add_metric([name], value)
    yield limits
    counts: Mapping[str, int] = status.get("counts", {})
    for field, (name, text) in TROUBLE_COUNTERS.items():
        yield CounterMetricFamily(name, text, value=counts.get(field, 0))
    malformed = status.get("malformed_messages", 0)
    yield CounterMetricFamily("twinpool_malformed_messages", "Control messages that were dropped.", value=malformed)
