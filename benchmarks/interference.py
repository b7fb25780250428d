"""What a long prefill does to live streams: their largest gap while it runs over their undisturbed median gap.

Two streams decode on the COMPLETION worker's core; then a prompt of 2,048 tokens is prefilled on the PROMPT worker's.
For comparison, vLLM's CPU build, which runs both on the same two cores, shows a ratio of 120 (a gap of 1.84 s).
"""

import argparse
import random
import statistics
import threading
import time

import httpx
from measure import print_header, running_cluster, spread, stream_times


class Stream(threading.Thread):
    """One client that keeps the times at which its chunks came."""

    def __init__(self, client: httpx.Client, num_tokens: int, seed: int) -> None:
        super().__init__()
        self.client, self.num_tokens = client, num_tokens
        self.prompt = random.Random(seed).choices(range(1000, 40000), k=64)
        self.times_s: list[float] = []

    def run(self) -> None:
        body = {"prompt": self.prompt, "max_tokens": self.num_tokens, "temperature": 0, "ignore_eos": True}
        for _ in stream_times(self.client, body):
            self.times_s.append(time.perf_counter())


def gaps_between(streams: list[Stream], start_s: float, end_s: float) -> list[float]:
    """Return the gaps, in any stream, that touch the interval."""
    pairs = [pair for s in streams for pair in zip(s.times_s, s.times_s[1:], strict=False)]
    return [after - before for before, after in pairs if after > start_s and before < end_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    print_header("interference: largest gap of two live streams during a prefill / their undisturbed median gap")
    engine = {"dtype": given.dtype, "max_num_batched_tokens": given.tokens, "num_threads": 1}
    pools = {pool: {"num_workers": 1, "engine": engine} for pool in ("prompt", "completion")}
    quiet: list[float] = []
    largest: list[float] = []
    ttft: list[float] = []
    with running_cluster({"model": given.model, **pools}) as client:
        for repeat in range(given.repeats + 1):
            streams = [Stream(client, 400, 10 * repeat + i) for i in range(2)]
            for stream in streams:
                stream.start()
            while any(len(stream.times_s) < 60 for stream in streams):
                time.sleep(0.01)
            began_s = time.perf_counter()
            prompt = random.Random(repeat).choices(range(1000, 40000), k=given.tokens)
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            first_s = next(at_s for at_s, chunk in stream_times(client, body) if chunk["choices"])
            for stream in streams:
                stream.join()
            if repeat:  # the first is the warm-up
                quiet += gaps_between(streams, min(s.times_s[10] for s in streams), began_s)
                largest.append(max(gaps_between(streams, began_s, began_s + first_s)))
                ttft.append(first_s)
    median_s = statistics.median(quiet)
    print(f"  a prompt of {given.tokens} tokens beside two streams, {given.dtype}, one thread a worker")
    print(f"  undisturbed gap:   {spread(quiet)}")
    print(f"  largest gap:       {spread(largest)}")
    print(f"  newcomer's TTFT:   {spread(ttft)}")
    worst = max(largest) / median_s
    print(f"  ratio: {statistics.median(largest) / median_s:.2f} (worst of {given.repeats}: {worst:.2f})")


if __name__ == "__main__":
    main()
