"""Writes runs as a Chrome trace: every pass of every resource, uncoalesced, for Perfetto and chrome://tracing."""

import json
from collections.abc import Sequence
from typing import Any

from .lanes import named_requests, request_phases, resources_of
from .result import Run

MAX_REQUESTS = 200  # with a lane of their own


def chrome_trace(runs: Sequence[Run]) -> str:
    """Return every pass of the runs, and the lives of the first requests, in the format that Perfetto opens."""
    events = list[dict[str, Any]]()
    for index, run in enumerate(runs):
        workers, requests = 2 * index + 1, 2 * index + 2
        resources = resources_of(run)
        events += _named(workers, f"{run.policy}: resources", resources)
        tids = {name: tid for tid, name in enumerate(resources, start=1)}
        for bar in sorted(run.bars, key=lambda bar: (bar.start_s, bar.resource)):
            about = {"passes": bar.num_passes, "prompt_tokens": bar.num_prefill_tokens}
            about |= {"output_tokens": bar.num_decode_tokens, "requests": named_requests(bar)}
            name = bar.kind + (f" ×{bar.num_passes}" if bar.num_passes > 1 else "")
            events.append(_event(name, workers, tids[bar.resource], bar.start_s, bar.end_s, about))
        shown = run.outcomes[:MAX_REQUESTS]
        names = [outcome.request.request_id for outcome in shown]
        events += _named(requests, f"{run.policy}: requests (first {len(shown)} of {len(run.outcomes)})", names)
        for tid, phases in enumerate(request_phases(run, shown), start=1):
            events += [_event(p.kind, requests, tid, p.start_s, p.end_s, {}) for p in phases]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, ensure_ascii=False) + "\n"


def _named(pid: int, process: str, threads: Sequence[str]) -> list[dict[str, Any]]:
    def metadata(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}

    events = [metadata("process_name", 0, {"name": process}), metadata("process_sort_index", 0, {"sort_index": pid})]
    for tid, thread in enumerate(threads, start=1):
        events.append(metadata("thread_name", tid, {"name": thread}))
        events.append(metadata("thread_sort_index", tid, {"sort_index": tid}))
    return events


def _event(name: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    """Return a complete event in µs; its ends are rounded to whole ns, so that neighbours still do not overlap."""
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    return {"name": name, "cat": name.split()[0], "ph": "X", "pid": pid, "tid": tid, **times, "args": args}
