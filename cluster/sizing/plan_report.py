"""The HTML page of a plan: what to build and why, over which sizes and rates it holds, and what it comes from."""

from collections.abc import Iterable, Sequence

from ..cost_profile import CostProfile
from .charts import HeatMap, LineChart, Series, frontier
from .distributions import LengthStatistics, describe
from .explore import Exploration, knee_per_s
from .page import Code, Part, Picture, Section, Table, page
from .plan import Plan, percentile_s
from .plan_words import attainment, headroom, milliseconds, slo_words, verdict
from .ranking import Choice
from .trials import Trial
from .units import format_s
from .workload import Request

RANK_HEADER = (
    *("policy", "workers", "cost", "attainment", "goodput/s", "per worker"),
    *("TTFT p50 / p90 / p99, ms", "TPOT p50 / p90 / p99, ms", "ITL p99, ms", "headroom", "binding"),
)


def report(plan: Plan, requests: Sequence[Request], profile: CostProfile, extra: Exploration, spec: str | None) -> str:
    """Return the page; `spec` is the plan's cluster.yaml, None where there is none."""
    sections = [
        Section("The plan", verdict(plan)),
        Section("Ranked", [Table(RANK_HEADER, rank_rows(plan.ranked)), *_evidence(plan.ranked)]),
        Section("Attainment over pool sizes", _map(plan, extra)),
        Section("Goodput against rate", _goodput(plan, extra)),
        Section("Throughput against speed", [Picture(_pareto(plan.trials).svg())]),
        Section("Cost", [_cost_table(plan, extra)]),
        Section("cluster.yaml", [Code(spec) if spec else "There is none: see the plan."]),
        Section("Workload", [_workload_table(plan, requests), *plan.explanation]),
        Section("Constants", [_constants_table(profile), _origin(profile)]),
    ]
    return page(
        "Pool sizes", sections if plan.ranked else [s for s in sections if s.title != "Ranked"], slo_words(plan)
    )


def rank_rows(choices: Iterable[Choice]) -> list[list[str]]:
    """Return the cells of the ranked table, as `RANK_HEADER` names them."""
    return [_rank_row(choice) for choice in choices]


def _rank_row(choice: Choice) -> list[str]:
    trial, candidate = choice.trial, choice.candidate
    return [
        candidate.kind,
        candidate.sizes,
        f"{choice.cost:g}",
        attainment(trial),
        f"{trial.goodput_per_s:.3g}",
        f"{trial.goodput_per_s / candidate.num_workers:.3g}",
        milliseconds(trial, "ttft_s"),
        milliseconds(trial, "tpot_s"),
        milliseconds(trial, "itl_s", "p99"),
        headroom(choice),
        choice.binding.constraint,
    ]


def _evidence(choices: Sequence[Choice]) -> list[Part]:
    return [f"{choice.candidate.label}: {choice.binding.constraint}; {choice.binding.evidence}." for choice in choices]


def _map(plan: Plan, extra: Exploration) -> list[Part]:
    if not extra.attainments or extra.centre is None:
        return ["No policy with two pools was simulated."]
    prompts = sorted({prompt for prompt, _ in extra.attainments})
    completions = sorted({completion for _, completion in extra.attainments})
    heat = HeatMap(
        f"Share of requests within the SLO ({plan.slo.attainment:.0%} wanted)",
        "COMPLETION workers",
        "PROMPT workers",
        completions,
        prompts,
        [[extra.attainments.get((prompt, completion)) for completion in completions] for prompt in prompts],
        format=".0%",
        low=0.0,
        high=1.0,
        marked=(prompts.index(extra.centre[0]), completions.index(extra.centre[1])),
    )
    return [Picture(heat.svg())]


def _goodput(plan: Plan, extra: Exploration) -> list[Part]:
    if not extra.curves:
        return ["Nothing was simulated."]
    curves = [
        Series(candidate.label, [(point.offered_per_s, point.goodput_per_s) for point in curve])
        for candidate, curve in extra.curves.items()
    ]
    limits = [("this workload", plan.demand.rate_per_s)]
    chart = LineChart(
        "Goodput of each policy's best", "requests/s offered", "requests/s within the SLO", curves, x_limits=limits
    )
    knees = [
        f"{candidate.label}: "
        + (f"meets the SLO up to {knee:.3g} requests/s." if knee else "meets it at none of these rates.")
        for candidate, curve in extra.curves.items()
        for knee in [knee_per_s(curve, plan.slo.attainment)]
    ]
    return [Picture(chart.svg()), *knees]


def _pareto(trials: Sequence[Trial]) -> LineChart:
    """Every candidate that was simulated: what a user gets against what a worker does."""
    dots: dict[str, list[tuple[tuple[float, float], str]]] = {}
    for trial in trials:
        tpot_s = percentile_s(trial, "tpot_s", "mean")
        tokens_per_s = trial.mean(lambda summary: summary.output_tokens_per_s)
        if tpot_s and tokens_per_s is not None:
            point = 1 / tpot_s, tokens_per_s / trial.candidate.num_workers
            name = f"{trial.candidate.label}: {point[0]:.3g} tokens/s/user, {point[1]:.3g} tokens/s/worker"
            dots.setdefault(trial.candidate.policy, []).append((point, f"{name}, {trial.attainment:.1%} attain"))
    series = [
        Series(policy, [point for point, _ in found], "dots", [name for _, name in found])
        for policy, found in dots.items()
    ]
    best = frontier([point for found in dots.values() for point, _ in found], "high", "high")
    return LineChart(
        "Every candidate", "tokens/s/user (1 / mean TPOT)", "tokens/s/worker", [*series, Series("frontier", best)]
    )


def _cost_table(plan: Plan, extra: Exploration) -> Table:
    known = {trial.candidate: trial for trial in plan.trials}
    rows: list[list[str]] = []
    for candidate in extra.curves:
        cost, goodput_per_s = candidate.cost(plan.limits), known[candidate].goodput_per_s
        per_goodput = f"{cost / goodput_per_s:.3g}" if goodput_per_s else "-"
        does = "yes" if known[candidate].meets else "no"
        rows.append([candidate.label, f"{cost:g}", f"{goodput_per_s:.3g}", per_goodput, does])
    return Table(("best of each policy", "cost", "goodput/s", "cost per goodput/s", "meets the SLO"), rows)


def _workload_table(plan: Plan, requests: Sequence[Request]) -> Table:
    found = describe(requests)

    def lengths(name: str, values: LengthStatistics) -> list[list[str]]:
        return [[f"{name} tokens, {key}", f"{getattr(values, key):,.0f}"] for key in ("mean", "p50", "p99", "max")]

    offered_per_s = plan.demand.offered_per_s
    rows = [
        ["requests of the first sample", f"{found.num_requests:,}"],
        ["first to last arrival", format_s(found.duration_s)],
        *([] if offered_per_s is None else [["rate offered", f"{offered_per_s:g}/s"]]),
        [
            "rate" if offered_per_s is None else "rate drawn",
            "-" if found.rate_per_s is None else f"{found.rate_per_s:.3g}/s",
        ],
        ["burstiness (CV)", "-" if found.burstiness is None else f"{found.burstiness:.2f}"],
        *lengths("prompt", found.prompt),
        *lengths("output", found.output),
    ]
    return Table(("", "value"), rows)


def _constants_table(profile: CostProfile) -> Table:
    rows = [
        [key, constant.status, f"{constant.value:.4g}", f"± {constant.spread:.2g}", constant.n, constant.reason]
        for key, constant in profile.constants.items()
    ]
    return Table(("constant", "status", "planned with", "spread", "n", "why not measured"), rows)


def _origin(profile: CostProfile) -> str:
    of = profile.fingerprint
    return (
        f"Of {of.model} ({of.dtype}) with the {of.engine} engine and {of.num_threads} threads on {of.host}, measured "
        f"{profile.measured_at}; fused passes by the rule {profile.fuse.rule} ({profile.fuse.status}). A constant that "
        "was not measured is planned with its upper bound."
    )
