"""A plan in words and figures: what to build, what of it can be started today, and the ranking for a terminal."""

from collections.abc import Callable

from .page import Part, Table
from .plan import Plan, percentile_s
from .ranking import HEADROOM_STEP, MAX_HEADROOM, Choice
from .summary import LIMIT_WORDS
from .trials import Candidate, Trial, is_startable
from .units import counted, format_s

BINDING = "binding"  # the column that a narrow terminal has no room for


def slo_words(plan: Plan) -> str:
    limits = [f"{LIMIT_WORDS[key]} up to {format_s(limit)}" for key, limit in plan.slo.limits().items()]
    share = f"for {plan.slo.attainment:.0%} of all requests"
    return f"SLO: {', '.join(limits)}, {share}; at most {counted(plan.limits.max_workers, 'worker')}."


def verdict(plan: Plan) -> list[Part]:
    """Return what the plan says, one paragraph each."""
    if plan.recommended is None:
        return [f"Infeasible: {plan.reason}."]
    best = plan.recommended
    parts: list[Part] = [f"Recommended: {best.candidate.label}.", plan.reason, figures(best)]
    parts.append(f"Binding: {best.binding.constraint}; {best.binding.evidence}.")
    if best.stability is not None:
        parts.append(f"Under the spread of the constants: {best.stability}.")
    return parts if is_startable(best.candidate.policy) else [*parts, *_startable(plan)]


def _startable(plan: Plan) -> list[Part]:
    """Say what can run today, where the recommended cannot."""
    assert plan.recommended is not None
    missing = "NORMAL workers" if plan.recommended.candidate.num_normal else "workers for `auto`"
    cannot = f"Twinpool cannot start {missing} yet. "
    if (choice := plan.startable) is not None:
        parts: list[Part] = [
            f"{cannot}The best it can start: {choice.candidate.label}, at a cost of {choice.cost:g}.",
            figures(choice),
        ]
        return [*parts, f"Under the spread of the constants: {choice.stability}."] if choice.stability else parts
    return [f"{cannot}{none_startable(plan)}."]


def none_startable(plan: Plan) -> str:
    """Say why there are no pools to start."""
    tried = [trial for trial in plan.trials if is_startable(trial.candidate.policy)]
    if not tried:
        is_tried = any(map(is_startable, plan.limits.policies))
        return "No two pools within the limits are large enough" if is_tried else "Two pools were not tried"
    best = max(tried, key=lambda trial: trial.attainment)
    return (
        f"No two pools within the limits meet the SLO; the best, {best.candidate.label}, attains {best.attainment:.1%} "
        f"of the {plan.slo.attainment:.0%} wanted, and most miss {best.worst_limit}"
    )


def figures(choice: Choice) -> str:
    """Return what a choice attains, in one sentence."""
    trial, num_workers = choice.trial, choice.candidate.num_workers
    words = [
        f"TTFT {milliseconds(trial, 'ttft_s')} ms and TPOT {milliseconds(trial, 'tpot_s')} ms (p50 / p90 / p99)",
        f"ITL p99 {milliseconds(trial, 'itl_s', 'p99')} ms",
        f"largest gap {format_ms(_largest_gap_s(trial))} ms",
        f"goodput {trial.goodput_per_s:.3g} requests/s, {trial.goodput_per_s / num_workers:.3g} a worker",
    ]
    more = "" if choice.headroom is None else f"; carries {headroom(choice)} times the rate"
    return f"{attainment(trial)} of the requests meet the SLO: {', '.join(words)}{more}."


def short_table(plan: Plan) -> Table:
    """Return the ranking for a terminal: of the times only those that the SLO limits."""
    share = "p99" if plan.slo.attainment > 0.95 else "p90"
    columns: list[tuple[str, Callable[[Trial], float | None]]] = [
        (f"{words}\n{at}, ms", lambda trial, key=key, at=at: percentile_s(trial, key, at))
        for limit, words, key, at in (
            (plan.slo.ttft_s, "TTFT", "ttft_s", share),
            (plan.slo.tpot_s, "TPOT", "tpot_s", share),
            (plan.slo.itl_p99_s, "ITL", "itl_s", "p99"),
        )
        if limit is not None
    ]
    if plan.slo.max_gap_s is not None:
        columns.append(("largest\ngap, ms", _largest_gap_s))
    rows = [
        [
            choice.candidate.kind,
            _initials(choice.candidate),
            f"{choice.cost:g}",
            attainment(choice.trial),
            *(format_ms(figure(choice.trial)) for _, figure in columns),
            headroom(choice),
            choice.binding.constraint,
        ]
        for choice in plan.ranked
    ]
    names = [name for name, _ in columns]
    return Table(("policy", "workers", "cost", "attainment", *names, "headroom", BINDING), rows)


def _initials(candidate: Candidate) -> str:
    if candidate.num_normal:
        return f"{candidate.num_normal} N"
    return f"{candidate.num_prompt} P + {candidate.num_completion} C"


def attainment(trial: Trial) -> str:
    return f"{trial.attainment:.1%} ± {100 * trial.noise:.1f}"


def headroom(choice: Choice) -> str:
    if choice.headroom is None:
        return "-"
    return f"{'≥ ' if choice.headroom * HEADROOM_STEP >= MAX_HEADROOM else ''}{choice.headroom:.2f}"


def _largest_gap_s(trial: Trial) -> float | None:
    return trial.mean(lambda summary: summary.max_gap_s)


def format_ms(seconds: float | None) -> str:
    """Say a time in milliseconds without an exponent, to three digits or to the millisecond."""
    if seconds is None:
        return "-"
    ms = seconds * 1000
    return f"{ms:,.{0 if ms >= 99.95 else 1 if ms >= 9.995 else 2}f}"


def milliseconds(trial: Trial, key: str, *percentiles: str) -> str:
    values = [percentile_s(trial, key, percentile) for percentile in percentiles or ("p50", "p90", "p99")]
    return " / ".join(map(format_ms, values))
