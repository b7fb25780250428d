"""What a simulated run writes down while it happens: tokens, gaps between them, and what kept each resource busy."""

from dataclasses import dataclass, field
from math import frexp, ldexp

from .result import Bar, BarKind, Outcome

GAP_WIDTH = 1e-4  # relative: gaps of slowly growing steps that differ by less are counted as one
MAX_GAP_ERROR = 1.2e-4  # relative: by how much a counted gap may be wrong
_MANTISSA = 1 << 14


@dataclass
class Ledger:
    keep_bars: bool
    end_s: float = 0.0
    gaps: dict[float, int] = field(default_factory=dict[float, int])
    busy_s: dict[str, float] = field(default_factory=dict[str, float])
    _bars: list[Bar] = field(default_factory=list[Bar])
    _open: dict[str, Bar] = field(default_factory=dict[str, Bar])  # each resource's latest

    def bars(self) -> list[Bar]:
        return sorted([*self._bars, *self._open.values()], key=lambda b: (b.start_s, b.end_s, b.resource))

    def occupy(self, bar: Bar) -> None:
        """Account for a resource's time; decode steps of the same sequences without a break are one bar."""
        self.busy_s[bar.resource] = self.busy_s.get(bar.resource, 0.0) + bar.duration_s
        self.end_s = max(self.end_s, bar.end_s)
        if not self.keep_bars:
            return
        last = self._open.get(bar.resource)
        if last is not None and _continues(last, bar):
            bar = _joined(last, bar)
        elif last is not None:
            self._bars.append(last)
        self._open[bar.resource] = bar

    def token(self, outcome: Outcome, now: float) -> None:
        """A single token of `outcome` was sent."""
        if outcome.last_token_s is None:
            outcome.first_token_s = now
        else:
            self.gap(outcome, now - outcome.last_token_s)
        outcome.last_token_s = now
        outcome.num_tokens += 1

    def gap(self, outcome: Outcome, gap_s: float) -> None:
        self.gaps[gap_s] = self.gaps.get(gap_s, 0) + 1
        if gap_s > outcome.max_gap_s:
            outcome.max_gap_s = gap_s

    def growing_gaps(self, first_s: float, growth_s: float, num_steps: int, num_sequences: int) -> None:
        """Count the gaps of consecutive steps, each `growth_s` longer than the one before.

        Exact when they do not grow; else counted under lengths that are wrong by less than MAX_GAP_ERROR.
        """
        gaps, step = self.gaps, 0 if num_sequences else num_steps
        while step < num_steps:
            length_s, num_alike = first_s + growth_s * step, num_steps - step
            if growth_s:
                num_alike = min(num_alike, 1 + int(GAP_WIDTH * length_s / growth_s))
                length_s = _rounded(length_s + growth_s * (num_alike - 1) / 2)
            gaps[length_s] = gaps.get(length_s, 0) + num_alike * num_sequences
            step += num_alike


def _rounded(length_s: float) -> float:
    """Round to 14 bits, so that many runs share few lengths."""
    mantissa, exponent = frexp(length_s)
    return ldexp(round(mantissa * _MANTISSA) / _MANTISSA, exponent)


def _continues(last: Bar, bar: Bar) -> bool:
    return last.kind == bar.kind == "decode" and last.end_s == bar.start_s and last.request_ids == bar.request_ids


def _joined(last: Bar, bar: Bar) -> Bar:
    kind: BarKind = "decode"
    passes, tokens = last.num_passes + bar.num_passes, last.num_decode_tokens + bar.num_decode_tokens
    return Bar(bar.resource, kind, last.start_s, bar.end_s, passes, 0, tokens, bar.request_ids)
