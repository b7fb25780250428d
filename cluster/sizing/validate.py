"""Predicted against measured: replays a recording's arrivals in the simulator and compares, statistic by statistic.

Both sides are a `Run`, summed up by the same code. A comparison counts only when both ran the same thing: what differs
is listed as a problem. Gates hold at 30 to 70 % load, and only where the live runs agree among themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import StatisticsError, correlation, fmean
from typing import Literal

from ..cost_profile import CostProfile
from ..costs import CostModel
from ..protocol.errors import ConfigError
from .bounds import Demand, demand_of, max_batch
from .conditions import problems_of
from .probing import ProbedWorker
from .recording import Recording
from .result import Outcome, Run
from .simulate import Pools, Rules, simulate
from .summary import Distribution, Slo, Summary, summarize

Metric = Literal["TTFT", "ITL", "TPOT", "E2E"]
Statistic = Literal["mean", "p50", "p90", "p99"]
Verdict = Literal["within", "missed", "noisy", "reported"]
METRICS: tuple[Metric, ...] = ("TTFT", "ITL", "TPOT", "E2E")
STATISTICS: tuple[Statistic, ...] = ("mean", "p50", "p90", "p99")
GATES: dict[Statistic, float] = {"mean": 0.10, "p50": 0.10, "p99": 0.20}
GATED_METRICS: tuple[Metric, ...] = ("TTFT", "ITL")
GATED_LOAD = (0.25, 0.75)  # 30 to 70 %, with room for what random arrivals make of it
UNLIMITED = 10**9  # sequences: where a step's fixed part no longer counts


@dataclass(frozen=True)
class Cell:
    """One statistic of one metric. Live and predicted are means over the runs, seconds."""

    metric: Metric
    statistic: Statistic
    live_s: float
    predicted_s: float
    repeatability: float | None  # half of what the live runs differ by, of their mean; None for a single run
    gate: float | None  # the largest error allowed; None: reported only

    @property
    def error(self) -> float:
        """Signed: positive when the prediction is too long."""
        return self.predicted_s / self.live_s - 1

    @property
    def verdict(self) -> Verdict:
        """`noisy`: the live runs differ from each other by more than the gate allows the prediction."""
        if self.gate is None:
            return "reported"
        if abs(self.error) <= self.gate:
            return "within"
        return "noisy" if (self.repeatability or 0.0) > self.gate else "missed"


@dataclass(frozen=True)
class PerRequest:
    """How well single requests are predicted; `bias` is the mean signed error."""

    metric: Metric
    num: int
    mape: float
    bias: float
    pearson: float | None  # None where one side does not vary


@dataclass(frozen=True)
class Validation:
    load: float  # share of the cluster's capacity, by the cost model
    cells: list[Cell]
    per_request: list[PerRequest]
    live: list[Run]
    predicted: list[Run]
    live_summaries: list[Summary]
    predicted_summaries: list[Summary]
    problems: list[str]  # why the two sides are not comparable

    @property
    def reasons(self) -> list[str]:
        """Why the validation failed; empty when it did not."""
        missed = [cell for cell in self.cells if cell.verdict == "missed"]
        return self.problems + [
            f"{cell.metric} {cell.statistic} is {cell.error:+.1%} off, more than {cell.gate:.0%}" for cell in missed
        ]


def validate(recording: Recording, profile: CostProfile, slo: Slo | None = None) -> Validation:
    """Replay each recorded run's arrivals and compare."""
    cost, pools = profile.expected(), pools_of(recording.header.workers)
    rules = Rules(colocated=is_colocated(recording.header.workers))
    runs = range(recording.num_runs)
    live = [recording.as_run(run) for run in runs]
    arrivals = [recording.sent(run) for run in runs]
    predicted = [simulate("disaggregated", r, cost, pools=pools, rules=rules, keep_bars=False) for r in arrivals]
    live_summaries, predicted_summaries = ([summarize(run, slo) for run in side] for side in (live, predicted))
    load = load_share(demand_of([r.request for r in recording.requests]), cost, pools, rules)
    return Validation(
        load=load,
        cells=_compare(live_summaries, predicted_summaries, is_gated(load)),
        per_request=[p for metric in PER_REQUEST if (p := _per_request(metric, live, predicted)) is not None],
        live=live,
        predicted=predicted,
        live_summaries=live_summaries,
        predicted_summaries=predicted_summaries,
        problems=problems_of(recording, profile),
    )


def is_gated(load: float) -> bool:
    return GATED_LOAD[0] <= load <= GATED_LOAD[1]


# --- What the simulator is told ---


def pools_of(workers: Sequence[ProbedWorker]) -> Pools:
    num_prompt = sum(worker.role == "PROMPT" for worker in workers)
    return Pools(num_prompt=num_prompt, num_completion=len(workers) - num_prompt)


def is_colocated(workers: Sequence[ProbedWorker]) -> bool:
    """Whether all workers share one host, and so its memory bandwidth."""
    return len({worker.host for worker in workers}) == 1


def load_share(demand: Demand, cost: CostModel, pools: Pools, rules: Rules) -> float:
    """Return the share of the busier pool's capacity that the demand takes."""
    return demand.rate_per_s * _busiest_s(demand, cost, pools, rules)


def rate_of_load(load: float, demand: Demand, cost: CostModel, pools: Pools, rules: Rules) -> float:
    """Return the arrivals a second of requests like these that make up this share of the capacity."""
    busiest_s = _busiest_s(demand, cost, pools, rules)
    if not busiest_s:
        raise ConfigError("by these costs a request takes no time: no rate is a load of them", hint="give a --rate")
    return load / busiest_s


def _busiest_s(demand: Demand, cost: CostModel, pools: Pools, rules: Rules) -> float:
    """Return the seconds that a request takes of the pool that runs full first; both pools are busy then."""
    prefill_s = fmean(cost.sent_pass_s([(0, tokens)]) for tokens in demand.prompt_tokens) / pools.num_prompt
    batch = max(1, int(min(max_batch(demand, cost), UNLIMITED)))
    token_s = cost.decode_s(batch, batch * demand.mean_context_tokens) / batch
    decode_s = (demand.mean_output_tokens - 1) * token_s / pools.num_completion  # the first token is the prefill's
    if rules.colocated:
        prefill_s, decode_s = prefill_s * cost.prefill_contention, decode_s * cost.decode_contention
    return max(prefill_s, decode_s)


# --- How far apart they are ---


def _compare(live: Sequence[Summary], predicted: Sequence[Summary], has_gates: bool) -> list[Cell]:
    return [
        cell
        for metric in METRICS
        for statistic in STATISTICS
        if (cell := _cell(metric, statistic, live, predicted, has_gates)) is not None
    ]


def _cell(
    metric: Metric, statistic: Statistic, live: Sequence[Summary], predicted: Sequence[Summary], has_gates: bool
) -> Cell | None:
    """Return None where a side has no such value: nothing got that far."""
    seen = _values(live, metric, statistic)
    expected = _values(predicted, metric, statistic)
    if len(seen) < len(live) or len(expected) < len(predicted) or not fmean(seen):
        return None
    repeatability = (max(seen) - min(seen)) / 2 / fmean(seen) if len(seen) > 1 else None
    gate = GATES.get(statistic) if has_gates and metric in GATED_METRICS else None
    return Cell(metric, statistic, fmean(seen), fmean(expected), repeatability, gate)


def _values(summaries: Sequence[Summary], metric: Metric, statistic: Statistic) -> list[float]:
    parts = [distribution_of(summary, metric) for summary in summaries]
    return [value for part in parts if (value := getattr(part, statistic)) is not None]


def distribution_of(summary: Summary, metric: Metric) -> Distribution:
    return {"TTFT": summary.ttft_s, "ITL": summary.itl_s, "TPOT": summary.tpot_s, "E2E": summary.e2e_s}[metric]


PER_REQUEST: dict[Metric, Callable[[Outcome], float | None]] = {
    "TTFT": lambda outcome: outcome.ttft_s,
    "TPOT": lambda outcome: outcome.tpot_s,
    "E2E": lambda outcome: outcome.e2e_s,
}


def paired(live: Sequence[Run], predicted: Sequence[Run]) -> Iterator[tuple[Outcome, Outcome]]:
    """Yield every request of every run as it was seen and as it was predicted."""
    for live_run, predicted_run in zip(live, predicted, strict=True):
        by_id = {outcome.request.request_id: outcome for outcome in predicted_run.outcomes}
        yield from ((outcome, by_id[outcome.request.request_id]) for outcome in live_run.outcomes)


def _per_request(metric: Metric, live: Sequence[Run], predicted: Sequence[Run]) -> PerRequest | None:
    """Compare request by request, over all runs; None when no request has the value on both sides."""
    value = PER_REQUEST[metric]
    both = [(value(seen), value(expected)) for seen, expected in paired(live, predicted)]
    pairs = [(seen, expected) for seen, expected in both if seen and expected is not None]
    if not pairs:
        return None
    errors = [expected / seen - 1 for seen, expected in pairs]
    try:
        pearson = correlation(*zip(*pairs, strict=True))
    except StatisticsError:
        pearson = None
    return PerRequest(metric, len(pairs), fsum(map(abs, errors)) / len(pairs), fmean(errors), pearson)
