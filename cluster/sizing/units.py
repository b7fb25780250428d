"""Quantities for people: seconds in the unit that leaves one to three digits before the point, counts, chunks."""

from math import floor, inf, log10

PREFIXES = {0: "s", -3: "ms", -6: "us", -9: "ns", -12: "ps"}


def format_s(seconds: float) -> str:
    """Say a time with three significant digits: `36.1 ms`, `0.47 us` never as `4.7e-07 s`."""
    if not seconds:
        return "0 s"
    digits = floor(log10(abs(seconds)) + 1e-9)
    power = min(0, max(-12, 3 * (digits // 3)))
    return f"{seconds / 10.0**power:.3g} {PREFIXES[power]}"


def counted(num: int, what: str) -> str:
    """Say how many: `1 request`, `1,200 requests`."""
    return f"{num:,} {what}{'' if num == 1 else 's'}"


def format_chunk(tokens: float) -> str:
    """Say C*: `121 tokens`; `none` where not even one token fits, `any` where tokens cost nothing."""
    if tokens == inf:
        return "any"
    return "none" if tokens < 1 else counted(round(tokens), "token")
