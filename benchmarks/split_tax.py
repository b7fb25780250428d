"""What the split costs a prompt: TTFT through the cluster over the same prefill timed inside one process.

Both use one thread, the same dtype, the same chunk budget and the same prompts; they take turns, so that whatever else
the machine does hits both. The target is at most 1.15 for 2,048 tokens.
"""

import argparse
import random
import statistics
import time

from measure import print_header, running_cluster, spread, stream_times
from twinpool.cluster.config import EngineSpec
from twinpool.cluster.protocol.messages import SamplingParams
from twinpool.engine.fetch import fetch_model
from twinpool.engine.model import ModelEngine, load_engine
from twinpool.engine.sequence import ScheduledRow, Sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    print_header("split tax: TTFT through the cluster / the same prefill in one process")
    settings = {"dtype": given.dtype, "max_num_batched_tokens": given.tokens, "num_threads": 1}
    engine = load_engine(fetch_model(given.model), EngineSpec.model_validate(settings))
    pools = {pool: {"num_workers": 1, "engine": settings} for pool in ("prompt", "completion")}
    alone, through, hidden = [], [], []
    with running_cluster({"model": given.model, **pools}) as client:
        for repeat in range(given.repeats + 1):
            prompt = random.Random(repeat).choices(range(1000, 40000), k=given.tokens)
            alone_s = prefill_s(engine, prompt)
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "timing": True}
            chunks = list(stream_times(client, body))
            if repeat:  # the first is the warm-up
                alone.append(alone_s)
                through.append(next(at_s for at_s, chunk in chunks if chunk["choices"]))
                hidden.append(chunks[-1][1]["timing"]["kv_share_hidden"])
    print(f"  {given.tokens} tokens, {given.dtype}, one thread a worker")
    print(f"  in one process:            {spread(alone)}")
    print(f"  TTFT through the cluster:  {spread(through)}")
    print(f"  share of KV that arrived before the prefill ended: {spread(hidden, '', 4)}")
    print(f"  ratio of medians: {statistics.median(through) / statistics.median(alone):.3f}")
    ratios = [t / a for t, a in zip(through, alone, strict=True)]
    print(f"  ratio, pair by pair: {spread(ratios, '')}")


def prefill_s(engine: ModelEngine, prompt: list[int]) -> float:
    """Time one prefill with its first token, nothing around it."""
    table = list(range(-(-len(prompt) // engine.block_size)))
    sequence = Sequence("alone", 1, prompt, len(prompt), SamplingParams(temperature=0.0), block_table=table)
    began_s = time.perf_counter()
    engine.step([ScheduledRow(sequence, 0, len(prompt), samples=True)])
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
