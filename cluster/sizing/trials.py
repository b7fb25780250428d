"""Candidates and what became of them: each simulated once, all on the same requests (common random numbers)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from statistics import fmean, pstdev, stdev

from ..costs import CostModel
from ..protocol.errors import ConfigError
from .result import Policy, Run
from .simulate import Pools, Rules, simulate
from .summary import LIMIT_WORDS, Slo, Summary, met_requests, summarize
from .workload import Request

POLICIES: tuple[Policy, ...] = ("shared", "chunked", "disaggregated")
NUM_STANDARD_ERRORS = 2.0

Samples = Sequence[Sequence[Request]]  # one workload, drawn several times: phases of arrival and lengths differ


@dataclass(frozen=True)
class Limits:
    """What a plan may use. Costs are of one worker, in any one unit."""

    max_workers: int = 16
    min_prompt: int = 1
    min_completion: int = 1
    prompt_cost: float = 1.0
    completion_cost: float = 1.0
    normal_cost: float = 1.0
    policies: tuple[Policy, ...] = POLICIES
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        for key in ("max_workers", "min_prompt", "min_completion"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} is {getattr(self, key)}, must be at least 1")
        for key in ("prompt_cost", "completion_cost", "normal_cost"):
            if not 0 < getattr(self, key) < inf:
                raise ConfigError(f"{key} is {getattr(self, key)}, must be greater than 0")
        if not self.policies:
            raise ConfigError("no policy is allowed", hint=f"there are {', '.join(POLICIES)} and auto")
        if (
            any(is_pair(policy) for policy in self.policies)
            and self.min_prompt + self.min_completion > self.max_workers
        ):
            least = self.min_prompt + self.min_completion
            raise ConfigError(f"max_workers is {self.max_workers}, but the least pools allowed have {least} workers")


def is_pair(policy: Policy) -> bool:
    """Say whether a policy has two pools."""
    return policy in ("disaggregated", "auto")


def is_startable(policy: Policy) -> bool:
    """Say whether Twinpool can run a policy today: there are no NORMAL workers yet, and none prefills for `auto`."""
    return policy == "disaggregated"


@dataclass(frozen=True)
class Candidate:
    policy: Policy
    num_prompt: int = 0
    num_completion: int = 0
    num_normal: int = 0
    chunk: int | None = None  # of chunked; None: C* at the running batch

    @property
    def num_workers(self) -> int:
        return self.num_prompt + self.num_completion + self.num_normal

    @property
    def sizes(self) -> str:
        if is_pair(self.policy):
            return f"{self.num_prompt} PROMPT + {self.num_completion} COMPLETION"
        return f"{self.num_normal} NORMAL"

    @property
    def kind(self) -> str:
        """The policy, and the chunk where it has one."""
        return f"{self.policy} {self.chunk or 'C*'}" if self.policy == "chunked" else self.policy

    @property
    def label(self) -> str:
        return f"{self.kind}: {self.sizes}"

    def is_within(self, other: "Candidate") -> bool:
        """Say whether this is the same with no pool larger."""
        return self.kind == other.kind and (
            self.num_prompt <= other.num_prompt
            and self.num_completion <= other.num_completion
            and self.num_normal <= other.num_normal
        )

    def cost(self, limits: Limits) -> float:
        return (
            self.num_prompt * limits.prompt_cost
            + self.num_completion * limits.completion_cost
            + self.num_normal * limits.normal_cost
        )

    def smaller(self, limits: Limits) -> Iterator["Candidate"]:
        """Yield what is left when one worker is taken away."""
        if self.num_prompt > limits.min_prompt:
            yield Candidate(self.policy, self.num_prompt - 1, self.num_completion)
        if self.num_completion > limits.min_completion:
            yield Candidate(self.policy, self.num_prompt, self.num_completion - 1)
        if self.num_normal > 1:
            yield Candidate(self.policy, num_normal=self.num_normal - 1, chunk=self.chunk)


@dataclass(frozen=True)
class Trial:
    """What became of a candidate. Every figure is the mean over the samples."""

    candidate: Candidate
    slo: Slo
    summaries: tuple[Summary, ...]
    busy_shares: dict[str, float] = field(
        default_factory=dict[str, float]
    )  # of "prompt", "completion", "normal", "link"
    met: tuple[tuple[bool, ...], ...] = ()  # by sample and request: whether it kept every limit
    offered_per_s: float | None = None  # the rate that the samples were drawn at; None: it is their own

    @property
    def attainment(self) -> float:
        return fmean(summary.slo_attainment or 0.0 for summary in self.summaries)

    @property
    def meets(self) -> bool:
        return self.attainment >= self.slo.attainment - 1e-12

    @property
    def noise(self) -> float:
        """How far off the attainment may be: two standard errors, of its requests or of its samples."""
        share = min(max(self.attainment, 0.0), 1.0)
        num = sum(summary.num_arrived for summary in self.summaries)
        error = sqrt(share * (1 - share) / num)
        if len(self.summaries) > 1:
            error = max(error, stdev(s.slo_attainment or 0.0 for s in self.summaries) / sqrt(len(self.summaries)))
        return NUM_STANDARD_ERRORS * error

    @property
    def goodput_per_s(self) -> float:
        if self.offered_per_s is not None:
            return self.attainment * self.offered_per_s
        return self.mean(lambda summary: summary.goodput_per_s) or 0.0

    @property
    def missed_shares(self) -> dict[str, float]:
        num = sum(summary.num_arrived for summary in self.summaries)
        return {key: sum(s.missed[key] for s in self.summaries) / num for key in self.summaries[0].missed}

    @property
    def worst_limit(self) -> str:
        """What most requests miss, in words."""
        shares = self.missed_shares
        worst = max(shares, key=lambda key: shares[key])
        return LIMIT_WORDS.get(worst, worst)

    def mean(self, figure: Callable[[Summary], float | None]) -> float | None:
        """Return a figure's mean over the samples that have it."""
        values = [value for summary in self.summaries if (value := figure(summary)) is not None]
        return fmean(values) if values else None


def noise_between(one: Trial, other: Trial) -> float:
    """Return the difference of two attainments that means nothing: two standard errors of the paired difference.

    Both served the same requests: those that both meet, or both miss, are no reason to doubt it. So it is far less
    than what each attainment may be off by itself (McNemar's test counts in the same way).
    """
    samples = zip(one.met, other.met, strict=True)
    differences = [int(a) - int(b) for mine, its in samples for a, b in zip(mine, its, strict=True)]
    return NUM_STANDARD_ERRORS * pstdev(differences) / sqrt(len(differences))


class Trials:
    """Simulates each candidate once, all on the same samples (common random numbers), and remembers it."""

    def __init__(
        self,
        samples: Samples,
        cost: CostModel,
        slo: Slo,
        limits: Limits,
        on_trial: Callable[[Candidate], None],
        known: Iterable[Trial] = (),
        offered_per_s: float | None = None,
    ) -> None:
        self.samples, self.cost, self.slo, self.limits = samples, cost, slo, limits
        self._offered_per_s = offered_per_s
        self._on_trial = on_trial
        self._known = {trial.candidate: trial for trial in known}

    def __call__(self, candidate: Candidate) -> Trial:
        if candidate not in self._known:
            self._known[candidate] = self.variant(candidate)
        return self._known[candidate]

    def variant(self, candidate: Candidate, cost: CostModel | None = None, rate: float = 1.0) -> Trial:
        """Simulate a candidate at other costs or at a multiple of the rate; it is not remembered."""
        samples = self.samples if rate == 1 else [faster(sample, rate) for sample in self.samples]
        trial = run_trial(candidate, samples, cost or self.cost, self.slo, self.limits.rules)
        self._on_trial(candidate)
        return trial if self._offered_per_s is None else replace(trial, offered_per_s=rate * self._offered_per_s)

    def under(self, cost: CostModel) -> "Trials":
        """Return trials of the same workload under other costs, with nothing remembered."""
        return Trials(self.samples, cost, self.slo, self.limits, self._on_trial, offered_per_s=self._offered_per_s)

    def all(self) -> list[Trial]:
        return list(self._known.values())


def faster(requests: Sequence[Request], rate: float) -> list[Request]:
    """Return the same requests at a multiple of the rate: time is compressed, lengths and order stay."""
    return [replace(request, arrival_s=request.arrival_s / rate) for request in requests]


def run_trial(candidate: Candidate, samples: Samples, cost: CostModel, slo: Slo, rules: Rules) -> Trial:
    pools = Pools(
        num_prompt=max(1, candidate.num_prompt),
        num_completion=max(1, candidate.num_completion),
        num_normal=max(1, candidate.num_normal),
    )
    runs = [
        simulate(candidate.policy, sample, cost, pools=pools, rules=rules, chunk=candidate.chunk, keep_bars=False)
        for sample in samples
    ]
    summaries, met = tuple(summarize(run, slo) for run in runs), tuple(met_requests(run, slo) for run in runs)
    return Trial(candidate, slo, summaries, _busy_shares(candidate, runs), met)


def _busy_shares(candidate: Candidate, runs: Sequence[Run]) -> dict[str, float]:
    """Return the share of time that the resources of each kind are busy."""
    nums = {
        "prompt": candidate.num_prompt,
        "completion": candidate.num_completion,
        "normal": candidate.num_normal,
        "link": candidate.num_prompt * candidate.num_completion,
    }
    busy_s = dict.fromkeys(nums, 0.0)
    for run in runs:
        for resource, seconds in run.busy_s.items():
            busy_s["link" if "→" in resource else resource.split("-")[0]] += seconds
    total_s = sum(run.end_s for run in runs)
    return {kind: busy_s[kind] / num / total_s for kind, num in nums.items() if num and total_s}
