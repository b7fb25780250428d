"""What a command about sizing is given: a workload, costs and limits, from flags in a user's units to our own."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from ..cost_profile import load_profile
from ..costs import CostModel
from ..protocol.errors import ConfigError
from ..sizing.distributions import LENGTHS_HELP, Workload, generate, parse_lengths
from ..sizing.overrides import override
from ..sizing.summary import Slo
from ..sizing.traces import read_trace
from ..sizing.workload import Request

USUAL_NUM_REQUESTS = 200
USUAL_PROMPT, USUAL_OUTPUT = "1000", "200"
FLAGS = {  # the keys that errors of the workload, the trace and the limits name, in the same units
    "rate_per_s": "--rate",
    "burstiness": "--burstiness",
    "num_requests": "--num-requests",
    "duration_s": "--duration",
    "stretch": "--stretch",
    "limit": "--limit",
    "attainment": "--attainment",
    "max_workers": "--max-workers",
    "prompt_cost": "--prompt-cost",
    "completion_cost": "--completion-cost",
    "normal_cost": "--normal-cost",
}
TOY = "--set prefill_overhead_s=0.001 --set prefill_per_token_s=10e-6 --set decode_base_s=0.01"


# Flags that several commands take, with their help.
Trace = Annotated[
    Path | None,
    typer.Argument(help="A recorded workload: CSV of Azure or Vidur, JSON lines of Mooncake or our own."),
]
Rate = Annotated[float | None, typer.Option(help="Without a trace: generate so many requests a second.")]
PromptLengths = Annotated[str | None, typer.Option(help=f"{LENGTHS_HELP} Default: {USUAL_PROMPT}.")]
OutputLengths = Annotated[str | None, typer.Option(help=f"Likewise, of the answers. Default: {USUAL_OUTPUT}.")]
Duration = Annotated[float | None, typer.Option(help="Seconds of arrivals to generate, instead.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the trace's first so many requests.")]
Stretch = Annotated[float | None, typer.Option(help="Factor on the trace's times: 2 halves its rate.")]
Burstiness = Annotated[
    float | None, typer.Option(help="Of the arrivals: 0 regular, 1 random (the default), 3 in bursts.")
]
TtftMs = Annotated[float | None, typer.Option(help="Limit on the time to the first token, ms.")]
TpotMs = Annotated[float | None, typer.Option(help="Limit on a request's mean time per token, ms.")]
ItlP99Ms = Annotated[float | None, typer.Option(help="Limit on the 99th percentile of all gaps, ms.")]
MaxGapMs = Annotated[float | None, typer.Option(help="Limit on a request's largest gap, ms.")]
Attainment = Annotated[float, typer.Option(help="Share of all arrivals that has to keep every limit.")]


@dataclass(frozen=True)
class WorkloadFlags:
    """A trace, or what to generate. None: the flag was not given."""

    trace: Path | None = None
    limit: int | None = None
    stretch: float | None = None
    rate_per_s: float | None = None
    prompt: str | None = None
    output: str | None = None
    burstiness: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int | None = None

    def requests(self) -> list[Request]:
        """Return the workload. Raises ConfigError for flags that contradict each other, or wrong values."""
        made = {
            "--rate": self.rate_per_s,
            "--prompt": self.prompt,
            "--output": self.output,
            "--burstiness": self.burstiness,
            "--num-requests": self.num_requests,
            "--duration": self.duration_s,
            "--seed": self.seed,
        }
        if self.trace is not None:
            _refuse(made, f"the requests come from {self.trace}; --stretch changes a trace's rate, --limit its length")
            with naming_flags():
                return read_trace(self.trace, limit=self.limit, stretch=1.0 if self.stretch is None else self.stretch)
        if self.rate_per_s is None:
            raise ConfigError("there is no workload", hint="give a trace file, or --rate 2 to generate one")
        _refuse({"--stretch": self.stretch, "--limit": self.limit}, "it is for a trace; --rate sets a rate")
        if self.num_requests is not None and self.duration_s is not None:
            raise ConfigError("--num-requests and --duration cannot be given together: each says how much to generate")
        with naming_flags():
            return generate(self._spec(self.rate_per_s))

    def _spec(self, rate_per_s: float) -> Workload:
        has_length = self.num_requests is not None or self.duration_s is not None
        return Workload(
            rate_per_s,
            parse_lengths(self.prompt or USUAL_PROMPT, "prompt"),
            parse_lengths(self.output or USUAL_OUTPUT, "output"),
            1.0 if self.burstiness is None else self.burstiness,
            self.num_requests if has_length else USUAL_NUM_REQUESTS,
            self.duration_s,
            self.seed or 0,
        )


def costs_given(path: Path | None, assignments: list[str]) -> tuple[CostModel, str]:
    """Return the profile's model with the constants that were set by hand, and whose constants they are in words.

    Without a profile all constants that were not set are free.
    """
    if path is None and not assignments:
        hint = f"--costs FILE (`twinpool calibrate -o FILE` makes one), or constants by hand: {TOY}"
        raise ConfigError("there are no costs", hint=hint)
    by_hand = f"by hand: {', '.join(assignments)}" if assignments else ""
    if path is None:
        return override(CostModel(), assignments), f"{by_hand}; all others are free"
    profile = load_profile(path)
    bounds = [key for key, constant in profile.constants.items() if constant.status != "measured"]
    of = f"{profile.fingerprint.model} ({profile.fingerprint.dtype}) on {profile.fingerprint.host}"
    words = [of, f"upper bounds, not measured: {', '.join(bounds)}" if bounds else "", by_hand]
    return override(profile.model(), assignments), "; ".join(word for word in words if word)


def slo_given(
    ttft_ms: float | None,
    tpot_ms: float | None,
    itl_p99_ms: float | None,
    max_gap_ms: float | None,
    attainment: float,
) -> Slo | None:
    """Return the limits, or None when there is not one."""
    limits_ms = {"--ttft-ms": ttft_ms, "--tpot-ms": tpot_ms, "--itl-p99-ms": itl_p99_ms, "--max-gap-ms": max_gap_ms}
    for flag, limit_ms in limits_ms.items():
        if limit_ms is not None and not 0 < limit_ms < inf:
            raise ConfigError(f"{flag} is {limit_ms:g}, must be a number greater than 0")
    limits = [None if limit_ms is None else limit_ms / 1e3 for limit_ms in limits_ms.values()]
    with naming_flags():
        slo = Slo(*limits, attainment=attainment)
    return slo if slo.limits() else None


@contextmanager
def naming_flags() -> Generator[None]:
    """Name the flag in an error of what was made of it: "rate_per_s is -2" becomes "--rate is -2"."""
    try:
        yield
    except ConfigError as error:
        key, is_, rest = error.message.removeprefix("slo: ").partition(" is ")
        if key not in FLAGS:
            raise
        raise ConfigError(f"{FLAGS[key]}{is_}{rest}", hint=error.hint) from error


def _refuse(flags: Mapping[str, object], why: str) -> None:
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        raise ConfigError(f"{' and '.join(given)} cannot be given here: {why}")
