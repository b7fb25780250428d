"""Discrete events: what happens to a workload on pools of workers, under a cost model.

The simulator decides nothing by itself: requests are placed by the router's own Placement, prompts chunked by the
PROMPT worker's own scheduler, batches formed and preempted by the COMPLETION worker's own, blocks owned in their own
pools. Only the time that a pass, a step or a transfer takes is the cost model's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import get_args

from ..costs import Capacity, CostModel
from ..protocol.errors import ConfigError
from .clock import Clock
from .contention import Host
from .ledger import Ledger
from .result import Outcome, Policy, Run
from .system import System
from .workload import Request
from .world import TEXTBOOK, Job, Limits, Mixing, Rules, World

__all__ = ["TEXTBOOK", "Pools", "Rules", "simulate"]


@dataclass(frozen=True)
class Pools:
    """Sizes: `num_prompt` and `num_completion` for disaggregated and auto, `num_normal` for shared and chunked."""

    num_prompt: int = 1
    num_completion: int = 1
    num_normal: int = 1


def simulate(
    policy: Policy,
    requests: Sequence[Request],
    cost: CostModel,
    *,
    pools: Pools | None = None,
    rules: Rules | None = None,
    chunk: int | None = None,
    keep_bars: bool = True,
) -> Run:
    """Run the whole workload to its end.

    `shared`: one pool, prefill passes go before decode steps. `chunked`: one pool, each pass runs at most `chunk`
    prompt tokens beside the decodes; None is C* at the running batch, rounded down, at least 16 (for a lone prompt: C*
    of a batch of one). `disaggregated`: two pools. `auto`: two pools, but a COMPLETION worker prefills a prompt itself,
    in chunks, when that is predicted to be sooner and to slow nobody down (see System).

    In one pool a worker's capacity is `cost.completion`; its token budget holds decodes and chunks together. A request
    that no worker could ever hold is refused; one that outgrows its worker is refused when it does. Equal input gives
    equal output, byte for byte.
    """
    pools, rules = pools or Pools(), rules or Rules()
    _check(policy, requests, pools, chunk)
    _check_cost(cost)
    jobs = _jobs(requests)
    world = World(cost, rules, Clock(), Ledger(keep_bars), Host(cost, rules.colocated), jobs)
    system = System(world, policy)
    limits, num_workers = Limits.of(cost.completion, requests), pools.num_normal
    if policy in ("shared", "chunked"):
        system.add_completion_workers("normal", num_workers, limits, Mixing(policy == "chunked", chunk))
    else:
        num_workers = pools.num_prompt + pools.num_completion
        system.add_prompt_workers(pools.num_prompt, Limits.of(cost.prompt, requests))
        system.add_completion_workers("completion", pools.num_completion, limits, Mixing(True, chunk))
    for job in jobs.values():
        system.expect(job)
    world.clock.run()
    system.check_at_rest()
    ledger, outcomes = world.ledger, [jobs[request.request_id].outcome for request in requests]
    return Run(policy, outcomes, ledger.gaps, num_workers, ledger.end_s, ledger.bars(), ledger.busy_s)


def _jobs(requests: Sequence[Request]) -> dict[str, Job]:
    in_order = sorted(requests, key=lambda r: r.arrival_s)
    return {request.request_id: Job(request, Outcome(request), order) for order, request in enumerate(in_order)}


def _check(policy: str, requests: Sequence[Request], pools: Pools, chunk: int | None) -> None:
    if policy not in get_args(Policy):
        raise ConfigError(f"policy is {policy!r}", hint=f"allowed are {', '.join(get_args(Policy))}")
    sizes = ["num_normal"] if policy in ("shared", "chunked") else ["num_prompt", "num_completion"]
    for name in sizes:
        if getattr(pools, name) < 1:
            raise ConfigError(f"{name} is {getattr(pools, name)}: {policy} needs at least 1 worker there")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk is {chunk} tokens: at least 1 is needed", hint="without one, C* is used")
    if not requests:
        raise ConfigError("the workload is empty: at least 1 request is needed")
    for request in requests:
        _check_request(request)
    twice = [request_id for request_id, count in Counter(r.request_id for r in requests).items() if count > 1]
    if twice:
        raise ConfigError(f"request_id {twice[0]!r} is given more than once: each request needs its own")


def _check_cost(cost: CostModel) -> None:
    parts = {"": cost, "decode.": cost.decode, "prompt.": cost.prompt, "completion.": cost.completion}
    for prefix, part in parts.items():
        for key, value in vars(part).items():
            least = 1 if isinstance(part, Capacity) else 0
            if isinstance(value, int | float) and not value >= least:
                raise ConfigError(f"cost model: {prefix}{key} is {value:g}, allowed are numbers from {least}")
    if not cost.transfer_bytes_per_s:
        raise ConfigError("cost model: transfer_bytes_per_s is 0, allowed are numbers above 0")


def _check_request(request: Request) -> None:
    name = f"request {request.request_id!r}"
    if not (isfinite(request.arrival_s) and request.arrival_s >= 0):
        raise ConfigError(f"{name}: arrival_s is {request.arrival_s:g}, allowed are finite numbers from 0")
    for key in ("num_prompt_tokens", "num_output_tokens"):
        if getattr(request, key) < 1:
            raise ConfigError(f"{name}: {key} is {getattr(request, key)}, at least 1 is needed")
