"""How fast the simulator and the planner are, on the Azure conversation hour (19,366 requests, 4.1 M output tokens).

First the whole hour under each policy, on pools large enough to carry it: the target is under 5 s. Then a plan for its
busiest 1,500 requests, which simulates more than 50 candidates and variants of them: under a minute. The costs are
those of Llama 3.1 8B on an H100, from its data sheet, and for the plan those that DistServe published for OPT-13B on an
A100. One process, one core. The trace is public (Azure/AzurePublicDataset, CC-BY 4.0).
"""

import argparse
import statistics
import time
from pathlib import Path

from measure import print_header, spread
from twinpool.cluster.commands.plan import busiest
from twinpool.cluster.costs import Capacity, CostModel, DecodeCost
from twinpool.cluster.sizing.plan import plan
from twinpool.cluster.sizing.result import Policy
from twinpool.cluster.sizing.simulate import Pools, simulate
from twinpool.cluster.sizing.summary import Slo
from twinpool.cluster.sizing.traces import read_trace
from twinpool.cluster.sizing.trials import Candidate, Limits
from twinpool.cluster.sizing.workload import Request

POLICIES: list[Policy] = ["shared", "chunked", "disaggregated", "auto"]
POOLS = Pools(num_prompt=2, num_completion=2, num_normal=3)
CAPACITY = Capacity(num_blocks=26_000, block_size=16, max_num_seqs=256, max_num_batched_tokens=8192)
KV_BYTES_PER_TOKEN, FLOP_PER_S, READ_BYTES_PER_S = 2 * 32 * 8 * 128 * 2, 0.6 * 989e12, 0.8 * 3.35e12
H100_8B = CostModel(
    prefill_floor_s=16e9 / READ_BYTES_PER_S,
    prefill_overhead_s=0.002,
    prefill_per_token_s=2 * 8e9 / FLOP_PER_S,
    prefill_per_token_sq_s=2 * 32 * 4096 / FLOP_PER_S,
    decode=DecodeCost(16e9 / READ_BYTES_PER_S, 2e-5, KV_BYTES_PER_TOKEN / READ_BYTES_PER_S),
    fuse="roofline",
    transfer_latency_s=0.0002,
    transfer_bytes_per_s=50e9,
    kv_bytes_per_token=KV_BYTES_PER_TOKEN,
    prompt=CAPACITY,
    completion=CAPACITY,
)
A100_CAPACITY = Capacity(num_blocks=4000, block_size=16, max_num_seqs=128, max_num_batched_tokens=2048)
A100_13B = CostModel(
    prefill_overhead_s=0.0181,
    prefill_per_token_s=101.9e-6,
    prefill_per_token_sq_s=7.1e-9,
    decode=DecodeCost(0.01993, 38.5e-6, 0.63e-6),
    transfer_latency_s=0.001,
    transfer_bytes_per_s=25e9,
    kv_bytes_per_token=819_200,
    prompt=A100_CAPACITY,
    completion=A100_CAPACITY,
)
NUM_PLANNED = 1500


def time_policies(requests: list[Request], num_repeats: int) -> None:
    num_tokens = sum(request.num_output_tokens for request in requests)
    print(f"  {len(requests)} requests, {num_tokens} output tokens; {POOLS}")
    for policy in POLICIES:
        taken_s: list[float] = []
        for _ in range(num_repeats):
            began_s = time.perf_counter()
            run = simulate(policy, requests, H100_8B, pools=POOLS, keep_bars=False)
            taken_s.append(time.perf_counter() - began_s)
        assert sum(outcome.num_tokens for outcome in run.outcomes) == num_tokens, "tokens were lost"
        rate = len(requests) / statistics.median(taken_s)
        print(f"  {policy + ':':15} {spread(taken_s)}, {rate:,.0f} requests/s, {run.end_s:.0f} s simulated")


def time_plan(requests: list[Request], num_repeats: int) -> None:
    taken_s: list[float] = []
    for _ in range(num_repeats):
        simulated: list[Candidate] = []
        began_s = time.perf_counter()
        found = plan(requests, A100_13B, Slo(ttft_s=1.0, tpot_s=0.08), Limits(24), on_progress=simulated.append)
        taken_s.append(time.perf_counter() - began_s)
        assert len(simulated) >= 50, "too few candidates to say how long 50 take"
    print(f"  {'plan:':15} {spread(taken_s)} for {len(simulated)} simulations of {len(requests)} requests")
    print(f"  {'':15} {50 * statistics.median(taken_s) / len(simulated):.1f} s for 50 of them; {found.reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds azure_2023_conv.csv")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print_header("simulator and planner: the Azure conversation hour")
    requests = read_trace(given.data / "azure_2023_conv.csv")
    time_policies(requests, given.repeats)
    time_plan(busiest(requests, NUM_PLANNED), given.repeats)


if __name__ == "__main__":
    main()
