"""What one caller may use at a time and in a minute. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Quota:
    """Limits of one API key; None: no limit of its own."""

    max_running_requests: int | None = None
    tokens_per_minute: int | None = None


NO_QUOTA = Quota()


@dataclass(frozen=True)
class QuotaExceeded:
    message: str
    retry_after_s: float | None = None  # None: when an answer ends


@dataclass
class Usage:
    """What one caller uses. `num_tokens`: what is left of its minute's; less than nothing when answers were long."""

    num_running: int = 0
    num_tokens: float | None = None
    at_s: float = 0.0


class Quotas:
    """Counts for callers that have a quota, by name: as many as there are keys."""

    def __init__(self) -> None:
        self._usages: dict[str, Usage] = {}

    def exceeded(self, name: str, quota: Quota, num_tokens: int, now: float) -> QuotaExceeded | None:
        """Return why a request with a prompt of `num_tokens` may not begin now."""
        usage = self._usages.get(name, Usage())
        limit = quota.max_running_requests
        if limit is not None and usage.num_running >= limit:
            return QuotaExceeded(f"Of this key {usage.num_running} answers are running already; allowed are {limit}.")
        per_minute = quota.tokens_per_minute
        if per_minute is None:
            return None
        needed, left = min(num_tokens, per_minute), _refilled(usage, per_minute, now)
        if left >= needed:
            return None
        message = f"This key may use {per_minute} tokens a minute, and too few of them are left."
        return QuotaExceeded(message, 60.0 * (needed - left) / per_minute)

    def begin(self, name: str, quota: Quota, num_tokens: int, now: float) -> None:
        if quota != NO_QUOTA:
            usage = self._usages.setdefault(name, Usage())
            usage.num_running += 1
            _take(usage, quota, num_tokens, now)

    def end(self, name: str, quota: Quota, num_output_tokens: int, now: float) -> None:
        """A request that had begun ended with so much output."""
        if quota != NO_QUOTA:
            usage = self._usages[name]
            usage.num_running -= 1
            _take(usage, quota, num_output_tokens, now)


def _refilled(usage: Usage, per_minute: int, now: float) -> float:
    if usage.num_tokens is None:
        return per_minute
    return min(usage.num_tokens + (now - usage.at_s) * per_minute / 60.0, per_minute)


def _take(usage: Usage, quota: Quota, num_tokens: int, now: float) -> None:
    if quota.tokens_per_minute is not None:
        usage.num_tokens = _refilled(usage, quota.tokens_per_minute, now) - num_tokens
        usage.at_s = now
