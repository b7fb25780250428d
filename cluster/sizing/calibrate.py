"""Measures the cost model's constants on live workers: whole passes, transfers, requests, and one beside the other.

It knows how to ask (a Prober) and in which order. Which shapes is schedule.py's, what follows from them
measurements.py's. One PROMPT and one COMPLETION worker stand for their pools, on one host where that is possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..cost_profile import CostProfile, Fingerprint
from ..protocol.errors import LaunchError
from .fit import PassTimes
from .measurements import Measurements, Serving, build_profile
from .measuring import (
    MIN_ROUNDS,
    MIN_ROUNDS_QUICK,
    Control,
    Probe,
    Report,
    Timed,
    check_controls,
    check_undisturbed,
    time_in_turn,
)
from .probing import ProbedWorker, Prober
from .schedule import CONTROL_SEQUENCES, SHORTEST_TOKENS, PassShape, Schedule, make_schedule

DEFAULT_BUDGET_S = 210.0
QUICK_BUDGET_S = 60.0
DEFAULT_MAX_DISTURBANCE = 0.25
NUM_REQUESTS = 9
MIN_SERVING_ROUNDS, MAX_SERVING_ROUNDS = 2, 16
NUM_SERVED = 3  # requests of a round
NUM_GAPS, NUM_SETTLING_GAPS = 120, 24
IN_TURN_SHARE = 0.6  # of the budget; the rest is for what is served


@dataclass(frozen=True)
class Options:
    """`max_disturbance`: how far a control's medians may move, and the repeats of most shapes scatter; relative.

    The medians of a shared two-core machine move by up to 15 % on their own; a second busy program on one of its cores
    makes them move by half and more.
    """

    budget_s: float = DEFAULT_BUDGET_S
    is_quick: bool = False
    max_disturbance: float = DEFAULT_MAX_DISTURBANCE
    num_threads: int = 1  # of a worker; part of what the constants belong to


@dataclass(frozen=True)
class Pair:
    """The two workers that are timed."""

    prober: Prober
    prompt: ProbedWorker
    completion: ProbedWorker

    def timed(self, worker: ProbedWorker, shapes: Sequence[PassShape]) -> dict[PassShape, Timed]:
        return {shape: Timed(shape.label, self.passes(worker, shape)) for shape in shapes}

    def passes(self, worker: ProbedWorker, shape: PassShape) -> Probe:
        return lambda num_warmup, num_repeats: self.prober.time_passes(worker.name, shape.rows, num_warmup, num_repeats)

    def transfers(self, num_tokens: int) -> Probe:
        names = self.prompt.name, self.completion.name
        return lambda num_warmup, num_repeats: self.prober.time_transfers(*names, num_tokens, num_warmup + num_repeats)[
            num_warmup:
        ]


def calibrate(prober: Prober, options: Options, measured_at: str, report: Report) -> CostProfile:
    """Time everything and return the constants. Raises LaunchError when the machine was disturbed meanwhile."""
    pair = pick_pair(prober)
    fingerprint = fingerprint_of(pair.prompt, options.num_threads)
    return build_profile(measure(pair, options, report), fingerprint, measured_at)


def measure(pair: Pair, options: Options, report: Report) -> Measurements:
    """Time everything there is to time on two workers."""
    schedule = make_schedule(pair.prompt, pair.completion, options.is_quick)
    fused_on, notes = _find_fused_worker(pair, schedule)
    prefill = pair.timed(pair.prompt, schedule.prefill)
    decode = pair.timed(pair.completion, schedule.decode)
    fused = pair.timed(fused_on, schedule.fused) if fused_on else {}
    transfers = {n: Timed(f"transfer of {n:,} tokens", pair.transfers(n)) for n in schedule.transfer_tokens}
    groups = [list(group.values()) for group in (prefill, decode, fused, transfers)]
    prefill_control = pair.passes(pair.prompt, schedule.prefill_control)
    decode_control = pair.passes(pair.completion, schedule.decode_control)
    controls = [
        Control(f"a pass of {schedule.prefill_control.label}", prefill_control),
        Control(f"a step of {schedule.decode_control.label}", decode_control),
    ]
    min_rounds = MIN_ROUNDS_QUICK if options.is_quick else MIN_ROUNDS
    budget_s = IN_TURN_SHARE * options.budget_s
    left_out = time_in_turn(groups, controls, min_rounds, budget_s, lambda what, x: report(what, IN_TURN_SHARE * x))
    if left_out:
        notes.append(f"left out, because the time budget had no room for them: {'; '.join(left_out)}")
    report("requests beside streams", IN_TURN_SHARE)
    serving = _time_serving(pair, schedule.served, (1 - IN_TURN_SHARE) * options.budget_s)
    report("small requests", 0.95)
    overheads_s = _time_requests(pair.prober)
    check_controls(controls)
    return Measurements(
        prompt=pair.prompt,
        completion=pair.completion,
        prefill=_passes(prefill),
        decode=_passes(decode),
        fused=_passes(fused),
        transfers_s={n: timed.times_s for n, timed in transfers.items() if timed.times_s},
        overheads_s=overheads_s,
        serving=serving,
        drift=check_undisturbed([shape for group in groups for shape in group], controls, options.max_disturbance),
        notes=notes,
    )


def pick_pair(prober: Prober) -> Pair:
    """Return a PROMPT and a COMPLETION worker, on one host if any two are. Raises LaunchError."""
    workers = prober.workers()
    pools = [[worker for worker in workers if worker.role == role] for role in ("PROMPT", "COMPLETION")]
    pairs = [Pair(prober, *both) for both in product(*pools)]
    if not pairs:
        there = ", ".join(f"{worker.name} ({worker.role})" for worker in workers) or "no worker"
        raise LaunchError(
            f"calibrating takes a PROMPT and a COMPLETION worker; there is {there}",
            hint="`twinpool status` shows what runs; `twinpool scale` adds workers",
        )
    return min(pairs, key=lambda pair: pair.prompt.host != pair.completion.host)


def fingerprint_of(worker: ProbedWorker, num_threads: int) -> Fingerprint:
    """Return what constants that are measured on this worker belong to."""
    return Fingerprint(
        model=worker.model,
        weights=worker.fingerprint,
        dtype=worker.dtype,
        engine=worker.engine,
        host=worker.host,
        num_threads=num_threads,
    )


def _time_serving(pair: Pair, shape: PassShape, budget_s: float) -> Serving:
    """Time one prompt's pass bare, served, and served while others decode; and the gaps of those with and without it.

    All in turn, so that a machine that drifts slows down each of them.
    """
    times, probe, prober = Serving([], [], [], [], []), pair.passes(pair.prompt, shape), pair.prober

    def served_s() -> list[float]:
        return [prober.time_request(shape.num_tokens).prefill_s for _ in range(NUM_SERVED)]

    num_streams = max(1, min(CONTROL_SEQUENCES, pair.completion.max_num_seqs - 1))
    for num_rounds in range(MAX_SERVING_ROUNDS):
        if num_rounds >= MIN_SERVING_ROUNDS and _spent_s(times, num_streams) * (1 + 1 / num_rounds) > budget_s:
            break
        times.probed_s.extend(probe(1, NUM_SERVED))
        times.served_s.extend(served_s())
        with prober.streams(num_streams) as streams:
            streams.gaps_s(NUM_SETTLING_GAPS)  # the streams' own prompts are in them
            times.gaps_s.extend(streams.gaps_s(NUM_GAPS))
            times.served_beside_s.extend(served_s())
            times.gaps_beside_s.extend(streams.gaps_s())
    return times


def _spent_s(times: Serving, num_streams: int) -> float:
    """About how long it took so far, warm-up included; the gaps of several streams lie beside each other."""
    bare_s = sum(times.probed_s) * (1 + 1 / NUM_SERVED)
    quiet_s = sum(times.gaps_s) * (1 + NUM_SETTLING_GAPS / NUM_GAPS)
    return bare_s + sum(times.served_s) + (quiet_s + sum(times.gaps_beside_s)) / num_streams


def _time_requests(prober: Prober) -> list[float]:
    """Return what small requests took besides waiting for their prefill and the prefill itself."""
    prober.time_request(SHORTEST_TOKENS)  # the first one opens connections
    times = [prober.time_request(SHORTEST_TOKENS) for _ in range(NUM_REQUESTS)]
    return [request.ttft_s - request.prefill_queue_s - request.prefill_s for request in times]


def _find_fused_worker(pair: Pair, schedule: Schedule) -> tuple[ProbedWorker | None, list[str]]:
    """Return a worker that runs prompts and decode rows in one pass, or why there is none."""
    if not schedule.fused:
        return None, ["no fused pass was timed: the workers have no room for one"]
    refusals: list[str] = []
    for worker in (pair.completion, pair.prompt):
        try:
            pair.passes(worker, schedule.fused[0])(0, 1)
        except LaunchError as error:
            refusals.append(f"{worker.name}: {error.message}")
        else:
            return worker, []
    return None, [f"no fused pass was timed: {'; '.join(refusals)}"]


def _passes(group: Mapping[PassShape, Timed]) -> list[PassTimes]:
    return [shape.timed(timed.times_s) for shape, timed in group.items() if timed.times_s]
