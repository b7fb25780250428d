"""Draws one request's timeline: where its time to the first token went, and when the KV was there.

Reads the `timing` object of an answer; its fields are those of cluster/metrics.py's Timeline.
"""

from collections.abc import Sequence
from typing import Any

WIDTH = 40
STAGES = (
    ("queue", "queue_s", "until a pair had room"),
    ("grant", "grant_s", "COMPLETION worker reserved its blocks"),
    ("prefill queue", "prefill_queue_s", "waiting in the PROMPT worker"),
    ("prefill", "prefill_s", "prompt computed, KV streamed meanwhile"),
    ("return", "return_s", "messages on their way"),
)


def draw_timeline(timing: dict[str, Any]) -> list[str]:
    """Return the timeline as lines of plain text."""
    ttft_s = timing["ttft_s"]
    stages = [(label, float(timing[key]), meaning) for label, key, meaning in STAGES]
    lines = [
        f"{label:<14}{_ms(length_s)}  {_bar(start_s, length_s, ttft_s)}  {meaning}"
        for (label, length_s, meaning), start_s in zip(stages, _starts(stages), strict=True)
    ]
    lines.append(f"{'= TTFT':<14}{_ms(ttft_s)}  {'─' * WIDTH}")
    if timing.get("second_token_s") is not None:
        lines.append(f"{'second token':<14}{_ms(timing['second_token_s'])}  after the first, from the other pool")
    lines.extend(_remarks(timing))
    return lines


def _starts(stages: Sequence[tuple[str, float, str]]) -> list[float]:
    starts, now_s = list[float](), 0.0
    for _, length_s, _ in stages:
        starts.append(now_s)
        now_s += length_s
    return starts


def _remarks(timing: dict[str, Any]) -> list[str]:
    share = timing.get("kv_share_hidden")
    lines: list[str] = []
    if share is not None:
        size = f"{timing['num_kv_bytes'] / 1e6:.1f} MB"
        lines.append(f"{share:.0%} of the KV ({size}) had arrived before the prefill ended")
    tokens = f"{timing['num_prompt_tokens']} prompt tokens ({timing['num_cached_tokens']} cached)"
    lines.append(f"{tokens}, {timing['num_output_tokens']} output tokens in {timing['end_s']:.2f} s")
    if timing["num_attempts"] > 1:
        lines.append(f"{timing['num_attempts']} attempts: a worker failed on the way, and the request went on")
    if timing["num_preemptions"]:
        lines.append(f"handed back for want of blocks and resumed: {timing['num_preemptions']}")
    return lines


def _bar(start_s: float, length_s: float, total_s: float) -> str:
    """Place a stage on a line of WIDTH characters; what is too short to see is a thin mark."""
    if total_s <= 0:
        return " " * WIDTH
    start = min(WIDTH - 1, round(start_s / total_s * WIDTH))
    length = min(WIDTH - start, round(length_s / total_s * WIDTH))
    return (" " * start + ("█" * length or "▏")).ljust(WIDTH)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:9.1f} ms"
