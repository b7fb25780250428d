"""Which pools meet an SLO, with as few simulations as it takes.

For each prefill pool the smallest decode pool is bisected, since attainment rises with it. A larger prefill pool is of
use only if it saves decode workers, so the decode pools tried form a falling staircase. Candidates below the bounds of
floors.py are never simulated.
"""

from collections.abc import Callable
from math import inf

from ..costs import CostModel
from .bounds import Demand, decode_state, estimate_pools, step_limit_s
from .floors import min_completion_workers, min_prompt_workers
from .result import Policy
from .summary import Slo
from .trials import Candidate, Trials, is_pair

USUAL_CHUNKS = (512, 2048)
LEAST_CHUNK = 16
PATIENCE = 2  # PROMPT workers that may be added without saving a COMPLETION worker, before the search gives up


def chunk_sizes(demand: Demand, cost: CostModel, slo: Slo, num_workers: int) -> list[int | None]:
    """Return the chunk sizes worth trying: C*, what the limit of a step allows, and the usual two.

    None is C* at whatever batch runs; it is left out where the expected batch leaves it no room.
    """
    state = decode_state(demand, cost, num_workers)
    batch = max(1, round(state.num_sequences)) if state.is_stable else cost.completion.max_num_seqs or 1
    cached = batch * demand.mean_context_tokens
    most = min(cost.completion.max_num_batched_tokens or inf, max(demand.prompt_tokens))
    sizes = [cost.chunk_size_within(step_limit_s(slo), batch, cached), *USUAL_CHUNKS]
    fixed = dict.fromkeys(int(min(size, most)) for size in sizes if size >= LEAST_CHUNK)
    return [*([None] if cost.chunk_size(batch, cached) >= LEAST_CHUNK else []), *fixed]


def search(trials: Trials, demand: Demand) -> tuple[int, int]:
    """Try every candidate that could be the best of its policy.

    Returns the least PROMPT and COMPLETION workers that any schedule needs; where they exceed the limit of workers,
    nothing was tried.
    """
    limits, cost, slo = trials.limits, trials.cost, trials.slo
    low_prompt = max(min_prompt_workers(sample, cost, slo) for sample in trials.samples)
    low_completion = max(min_completion_workers(sample, cost, slo) for sample in trials.samples)
    guess = estimate_pools(demand, cost, slo, limits.max_workers)
    completion = guess.num_completion or limits.max_workers
    lows = max(limits.min_prompt, low_prompt), max(limits.min_completion, low_completion)
    first = max(guess.num_prompt or 1, completion)
    for policy in limits.policies:
        if is_pair(policy):
            least_prompt = limits.min_prompt if policy == "auto" else lows[0]  # auto prefills on both sides
            _walk_pairs(trials, policy, (least_prompt, lows[1]), completion)
            continue
        for chunk in chunk_sizes(demand, cost, slo, completion) if policy == "chunked" else [None]:
            found = _smallest_normal(trials, policy, chunk, max(low_prompt, low_completion), first)
            first = found or first
    return lows


def _smallest_normal(trials: Trials, policy: Policy, chunk: int | None, low: int, first: int) -> int | None:
    def meets(num: int) -> bool:
        return trials(Candidate(policy, num_normal=num, chunk=chunk)).meets

    return smallest(meets, low, trials.limits.max_workers, first)


def _walk_pairs(trials: Trials, policy: Policy, lows: tuple[int, int], first: int) -> None:
    """Find the smallest decode pool for each prefill pool, until a larger prefill pool can save nothing any more."""
    limits, (low_prompt, low_completion) = trials.limits, lows
    ceiling: int | None = None  # what the prefill pool before needed of COMPLETION workers
    cheapest, num_in_vain = inf, 0
    for prompt in range(low_prompt, limits.max_workers - low_completion + 1):

        def meets(completion: int, prompt: int = prompt) -> bool:
            return trials(Candidate(policy, prompt, completion)).meets

        room = limits.max_workers - prompt
        if Candidate(policy, prompt, low_completion).cost(limits) > cheapest or num_in_vain == PATIENCE:
            break
        if ceiling is None and not meets(room) and not meets(min(max(first, low_completion), room)):
            continue  # neither all that is left nor what was expected helps: it is the prefill pool that is too small
        found = smallest(meets, low_completion, min(room, ceiling or room), ceiling or first)
        if found is not None:
            num_in_vain = num_in_vain + 1 if found == ceiling else 0
            ceiling, cheapest = found, min(cheapest, Candidate(policy, prompt, found).cost(limits))


def smallest(meets: Callable[[int], bool], low: int, high: int, first: int) -> int | None:
    """Return the smallest number in [low, high] that `meets`, which holds from some number on; starts at `first`."""
    if low > high:
        return None
    probe, step = min(max(first, low), high), 1
    if meets(probe):
        best = probe
        while best > low and meets(probe := max(low, best - step)):
            best, step = probe, 2 * step
        failing = probe if best > low else low - 1
    else:
        failing = probe
        while failing < high and not meets(probe := min(high, failing + step)):
            failing, step = probe, 2 * step
        if failing == high:
            return None
        best = probe
    while best - failing > 1:
        middle = (best + failing) // 2
        best, failing = (middle, failing) if meets(middle) else (best, middle)
    return best
