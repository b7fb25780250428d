"""What layer-wise frames cost a short prompt: TTFT with the default frame limits / with all KV in one frame at the end.

Two clusters of real workers with the chat model take turns, so that whatever else the machine does hits both; the
second one differs only in its frame limits. The targets: at most 1.05 times the TTFT for prompts shorter than 256
tokens, and the second token within one decode step and 5 ms of the arrival of the KV, by the router's timing. A decode
step is the median gap of the same stream's later tokens.
"""

import argparse
import random
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import print_header, spread, stream_times
from twinpool.engine.fetch import fetch_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from live_cluster import LiveCluster

ONE_FRAME = {"min_frame_bytes": 256 << 20, "max_frame_bytes": 256 << 20, "credit_bytes": 256 << 20}
LIMITS: dict[str, dict[str, int]] = {"default frames": {}, "one frame": ONE_FRAME}
TARGET_RATIO, TARGET_AFTER_STEP_S = 1.05, 0.005
NUM_OUTPUT_TOKENS = 12


@dataclass
class Figures:
    """What one cluster showed for one length of prompt, a value a request."""

    ttft_s: list[float] = field(default_factory=list[float])
    second_s: list[float] = field(default_factory=list[float])  # from the first token
    after_step_s: list[float] = field(default_factory=list[float])  # second token − arrival of the KV − one step
    step_s: list[float] = field(default_factory=list[float])

    def add(self, chunks: list[tuple[float, dict[str, Any]]]) -> None:
        times_s = [at_s for at_s, chunk in chunks if chunk["choices"] and chunk["choices"][0]["token_ids"]]
        timing = chunks[-1][1]["timing"]
        step_s = statistics.median(b - a for a, b in pairwise(times_s[1:]))
        self.ttft_s.append(times_s[0])
        self.second_s.append(times_s[1] - times_s[0])
        self.step_s.append(step_s)
        self.after_step_s.append(timing["second_token_s"] - timing["last_kv_s"] - step_s)


def ask(cluster: LiveCluster, num_tokens: int, seed: int) -> list[tuple[float, dict[str, Any]]]:
    prompt = random.Random(seed).choices(range(1000, 40000), k=num_tokens)
    body = {"prompt": prompt, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    return list(stream_times(cluster.client, {**body, "timing": True, "return_token_ids": True}))


def measure(clusters: dict[str, LiveCluster], lengths: list[int], num_rounds: int) -> dict[int, dict[str, Figures]]:
    figures = {length: {name: Figures() for name in clusters} for length in lengths}
    for number in range(num_rounds + 1):
        order = list(clusters.items())[:: 1 if number % 2 else -1]  # neither always comes first
        for length in lengths:
            for name, cluster in order:
                chunks = ask(cluster, length, seed=1000 * length + number)
                if number:  # the first is the warm-up
                    figures[length][name].add(chunks)
    return figures


def show(length: int, figures: dict[str, Figures]) -> None:
    print(f"\n  a prompt of {length} tokens")
    for name, own in figures.items():
        ttft, second = spread([1e3 * s for s in own.ttft_s], "ms", 1), spread([1e3 * s for s in own.second_s], "ms", 1)
        print(f"    {name + ':':<17}TTFT {ttft}; to the second token {second}")
    layered, whole = (figures[name] for name in LIMITS)
    ratios = [a / b for a, b in zip(layered.ttft_s, whole.ttft_s, strict=True)]
    verdict = "met" if statistics.median(ratios) <= TARGET_RATIO else "missed"
    print(f"    ratio of TTFT, pair by pair: {spread(ratios, '')}, at most {TARGET_RATIO}: {verdict}")
    late_s = statistics.median(layered.after_step_s)
    verdict = "met" if late_s <= TARGET_AFTER_STEP_S else "missed"
    late = spread([1e3 * s for s in layered.after_step_s], "ms", 1)
    step = spread([1e3 * s for s in layered.step_s], "ms", 1)
    print(f"    second token behind the KV's arrival and a step of {step}: {late}, at most 5: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 128, 255])
    parser.add_argument("--rounds", type=int, default=25)
    given = parser.parse_args()
    print_header("coalescing: TTFT of short prompts with layer-wise frames / with all KV in one frame at the end")
    print(f"  {given.model}, {given.dtype}, one worker a pool, one thread a worker")
    folder = fetch_model(given.model)
    engine = {
        "dtype": given.dtype,
        "num_threads": 1,
        "poison_freed_blocks": False,
    }  # test clusters do, and it takes time
    pools = {pool: {"engine": engine} for pool in ("prompt", "completion")}
    with ExitStack() as stack:
        specs = {name: {**pools, "transfer": limits} for name, limits in LIMITS.items()}
        clusters = {name: stack.enter_context(LiveCluster(folder, spec)) for name, spec in specs.items()}
        for length, figures in measure(clusters, given.lengths, given.rounds).items():
            show(length, figures)


if __name__ == "__main__":
    main()
