"""The formats of recorded workloads: which keys hold what, and what each value may be."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Any

from ..protocol.errors import ConfigError

UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_TIME = 10**19  # in any unit: today is 1.8e18 ns after 1970


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    if isinstance(value, str):
        value = int(value) if value.strip().isdecimal() else float(value)
    if not isfinite(value):
        raise ValueError
    return value


def _time(value: Any) -> int | float:
    time = _number(value)
    if not 0 <= time <= MAX_TIME:
        raise ValueError
    return time


def _microseconds(value: Any) -> int:
    moment = datetime.fromisoformat(value)
    since_epoch = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - UNIX_EPOCH
    return since_epoch // timedelta(microseconds=1)


def _num_tokens(value: Any) -> int:
    number = _number(value)
    if number < 1 or number != int(number):
        raise ValueError
    return int(number)


def _identifier(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError
    return str(value)


def _hashes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ValueError
    return tuple(value)


@dataclass(frozen=True)
class Kind:
    """What a value may be. `parse` raises ValueError, TypeError or OverflowError for anything else."""

    parse: Callable[[Any], Any]
    allowed: str


TIME = Kind(_time, f"a number from 0 to {MAX_TIME:.0e}")
DATE = Kind(_microseconds, "a date and time such as 2023-11-16 18:15:46.68")
NUM_TOKENS = Kind(_num_tokens, "a whole number of at least 1")
IDENTIFIER = Kind(_identifier, "a text or a whole number")
HASHES = Kind(_hashes, "a list of whole numbers")


@dataclass(frozen=True)
class TraceFormat:
    """Which keys hold what. The first three identify a format."""

    name: str
    arrival: str
    prompt: str
    output: str
    units_per_s: int = 1  # of the arrival
    arrival_kind: Kind = TIME
    hashes: str = "prefix_hashes"
    request_id: str = "request_id"

    @property
    def keys(self) -> tuple[str, str, str]:
        return self.arrival, self.prompt, self.output


FORMATS = (
    TraceFormat("Twinpool", "arrival_s", "num_prompt_tokens", "num_output_tokens"),
    TraceFormat("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", 1_000_000, DATE),
    TraceFormat("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    TraceFormat("Mooncake", "timestamp", "input_length", "output_length", 1_000, hashes="hash_ids"),
    TraceFormat("LLMServingSim bench", "arrival_time", "input_toks", "output_toks"),
    TraceFormat("LLMServingSim workload", "arrival_time_ns", "input_toks", "output_toks", 1_000_000_000),
)
KNOWN = "known are " + "; ".join(f"{', '.join(known.keys)} ({known.name})" for known in FORMATS)


def matching_formats(keys: Iterable[str]) -> list[TraceFormat]:
    """Return the formats whose keys are all there."""
    there = set(keys)
    return [known for known in FORMATS if there.issuperset(known.keys)]


def detect(where: str, keys: set[str]) -> TraceFormat:
    """Return the one format that has these keys, or raise ConfigError saying what is missing."""
    matches = matching_formats(keys)
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = " and ".join(known.name for known in matches)
        raise ConfigError(f"{where}: the keys of {names} at once, only one format a file is allowed")
    nearest = max(FORMATS, key=lambda known: len(keys.intersection(known.keys)))
    missing = [key for key in nearest.keys if key not in keys]
    if len(missing) < len(nearest.keys):
        raise ConfigError(f"{where}: {', '.join(missing)} is missing for the format of {nearest.name}", hint=KNOWN)
    raise ConfigError(f"{where}: no known trace has the keys {', '.join(sorted(keys)) or '(none)'}", hint=KNOWN)
