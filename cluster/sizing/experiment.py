"""One workload under several policies: what `twinpool simulate` runs, and how it is told in words and in JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..costs import Capacity, CostModel
from .distributions import WorkloadStatistics, describe
from .lanes import check_bars
from .result import Policy, Run
from .simulate import Pools, Rules, simulate
from .summary import LIMIT_WORDS, Slo, Summary, summarize
from .units import counted, format_chunk
from .workload import Request


@dataclass(frozen=True)
class Simulated:
    run: Run
    summary: Summary
    pools: Mapping[str, int]  # workers by what they do: {"PROMPT": 1, "COMPLETION": 1}
    chunk: int | None = None  # tokens, where a size was given and the policy cuts prompts


@dataclass(frozen=True)
class Experiment:
    requests: Sequence[Request]
    costs: CostModel
    source: str  # whose constants they are, in words
    policies: Sequence[Policy]
    pools: Pools
    rules: Rules
    chunk: int | None = None  # of chunked and auto; None: C*
    slo: Slo | None = None
    warmup_s: float = 0.0

    def run(self, policy: Policy, keep_bars: bool = False) -> Simulated:
        """Simulate one policy; bars that are kept are checked too."""
        run = simulate(
            *(policy, self.requests, self.costs),
            pools=self.pools,
            rules=self.rules,
            chunk=self.chunk,
            keep_bars=keep_bars,
        )
        if keep_bars:
            check_bars(run)
        chunk = self.chunk if policy in ("chunked", "auto") else None
        return Simulated(run, summarize(run, self.slo, self.warmup_s), self._pools_of(policy), chunk)

    def facts(self) -> list[str]:
        """Say in a few lines what is simulated."""
        limits = "none; goodput needs one (--ttft-ms, --tpot-ms, --itl-p99-ms, --max-gap-ms)"
        reading = f"C* beside one sequence: {format_chunk(self.costs.chunk_size())}, so {self.costs.chunk_or_split()}"
        prompt, completion = _capacity_in_words(self.costs.prompt), _capacity_in_words(self.costs.completion)
        return [
            f"Workload: {_workload_in_words(describe(self.requests))}.",
            f"Costs: {self.source}. {reading}.",
            f"Room in a PROMPT worker: {prompt}; in one that decodes: {completion}.",
            f"Limits: {limits if self.slo is None else _limits_in_words(self.slo)}.",
        ]

    def to_json(self, runs: Sequence[Simulated]) -> dict[str, Any]:
        """Return everything that went in and came out; times are seconds, and "without limit" is None or infinite."""
        return {
            "workload": asdict(describe(self.requests)),
            "costs": asdict(self.costs),
            "costs_source": self.source,
            "rules": asdict(self.rules),
            "pools": asdict(self.pools),
            "chunk": self.chunk,
            "runs": [run.summary.to_json() for run in runs],
        }

    def _pools_of(self, policy: Policy) -> dict[str, int]:
        if policy in ("shared", "chunked"):
            return {"NORMAL": self.pools.num_normal}
        return {"PROMPT": self.pools.num_prompt, "COMPLETION": self.pools.num_completion}


def _capacity_in_words(capacity: Capacity) -> str:
    blocks = (
        "KV without limit"
        if capacity.num_blocks is None
        else f"{counted(capacity.num_blocks, 'block')} of {counted(capacity.block_size, 'token')}"
    )
    return blocks + ("" if capacity.max_num_seqs is None else f", {counted(capacity.max_num_seqs, 'sequence')}")


def _limits_in_words(slo: Slo) -> str:
    limits = " and ".join(f"{LIMIT_WORDS[key]} ≤ {limit * 1e3:g} ms" for key, limit in slo.limits().items())
    return f"{limits}, for {slo.attainment:.0%} of all arrivals"


def _workload_in_words(workload: WorkloadStatistics) -> str:
    rate = "" if workload.rate_per_s is None else f", {workload.rate_per_s:,.3g}/s"
    burst = "" if workload.burstiness is None else f", burstiness {workload.burstiness:.2f}"
    prompt, output = (
        f"{counted(round(side.mean), 'token')} (p50 {side.p50:,}, p99 {side.p99:,})"
        for side in (workload.prompt, workload.output)
    )
    lengths = f"prompts {prompt}, outputs {output}"
    return f"{counted(workload.num_requests, 'request')} in {workload.duration_s:,.1f} s{rate}{burst}; {lengths}"
