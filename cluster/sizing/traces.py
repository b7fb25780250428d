"""Recorded workloads: CSV and JSON lines files of arrivals and lengths, ours and others', told apart by their keys.

The whole file is one format. Whatever clock it used, the first arrival becomes 0. Lengths are never changed; a trace's
rate is changed by stretching time, so that sessions which share a prefix stay together.
"""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ..protocol.errors import ConfigError
from .trace_formats import FORMATS, HASHES, IDENTIFIER, NUM_TOKENS, Kind, TraceFormat, detect, matching_formats
from .units import counted
from .workload import Request

Record = Mapping[str, Any]  # of one line: what a key (JSON) or a column (CSV) holds
MAX_STRETCH = 1e6
RECORDING_HEADER = "twinpool-recording/"  # how the `format` of a recording's first line begins


def read_trace(path: Path, *, limit: int | None = None, stretch: float = 1.0) -> list[Request]:
    """Read a trace in any of `FORMATS`: sorted by arrival, the first at 0.

    `limit` keeps the earliest so many; `stretch` multiplies every time between arrivals: 2 halves the rate. Raises
    ConfigError naming the line and the key.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}, must be at least 1 request")
    if not 0 < stretch <= MAX_STRETCH:
        raise ConfigError(
            f"stretch is {stretch}, must be above 0 and at most {MAX_STRETCH:g}",
            hint="2 halves the rate, 0.5 doubles it",
        )
    table = _load(path)
    trace = _TraceReader(path, table.format)
    rows = [trace.row(index, line, record) for index, (line, record) in enumerate(table.records)]
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    rows.sort(key=lambda row: row[0])
    first, units_per_s = rows[0][0], trace.format.units_per_s
    return [
        Request(request_id, (arrival - first) / units_per_s * stretch, num_prompt, num_output, hashes)
        for arrival, request_id, num_prompt, num_output, hashes in rows[:limit]
    ]


def detect_format(path: Path) -> str:
    """Say what a file is taken for, such as "Azure CSV". Raises ConfigError as `read_trace` does."""
    table = _load(path)
    return f"{table.format.name} {table.container}"


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Write our own JSON lines; `read_trace` gives the same requests back, from the first arrival on."""
    try:
        path.write_text("".join(json.dumps(_written(request)) + "\n" for request in requests))
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error.strerror}") from error


def _written(request: Request) -> Record:
    own = FORMATS[0]
    written = {
        own.request_id: request.request_id,
        own.arrival: request.arrival_s,
        own.prompt: request.num_prompt_tokens,
        own.output: request.num_output_tokens,
    }
    return {**written, own.hashes: request.prefix_hashes} if request.prefix_hashes else written


class _TraceReader:
    """Turns the records of one file into values, and knows the identifiers it has seen."""

    def __init__(self, path: Path, format: TraceFormat) -> None:
        self.format = format
        self._path = path
        self._seen: dict[str, int] = {}  # request_id → line

    def row(self, index: int, line: int, record: Record) -> tuple[float, str, int, int, tuple[int, ...]]:
        """Return (arrival in the file's unit, request_id, prompt tokens, output tokens, prefix hashes)."""
        known, where = self.format, f"{self._path}, line {line}"
        if any(key not in record for key in known.keys):
            raise ConfigError(f"{where}: {_mismatch(known, record)}")
        request_id: str = _value(where, record, known.request_id, IDENTIFIER, default=f"r{index}")
        if request_id in self._seen:
            raise ConfigError(f"{where}: {known.request_id} is {request_id!r}, as in line {self._seen[request_id]}")
        self._seen[request_id] = line
        return (
            _value(where, record, known.arrival, known.arrival_kind),
            request_id,
            _value(where, record, known.prompt, NUM_TOKENS),
            _value(where, record, known.output, NUM_TOKENS),
            _value(where, record, known.hashes, HASHES, default=()),
        )


def _value(where: str, record: Record, key: str, kind: Kind, default: Any = None) -> Any:
    if default is not None and key not in record:
        return default
    try:
        return kind.parse(record[key])
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: {key} is {record[key]!r}, must be {kind.allowed}") from error


def _mismatch(known: TraceFormat, record: Record) -> str:
    missing = ", ".join(key for key in known.keys if key not in record)
    other = [name for name in matching_formats(record) if name != known]
    if other:
        return f"a line in the format of {other[0].name} among those of {known.name}, only one format a file is allowed"
    return f"{missing} is missing; a line in the format of {known.name} has {', '.join(known.keys)}"


@dataclass(frozen=True)
class _Table:
    """A file's lines as they were written, whatever they mean."""

    container: Literal["CSV", "JSON lines"]
    format: TraceFormat  # by the keys of the header, or of the first record
    records: list[tuple[int, Record]]  # each with the number of its line


def _load(path: Path) -> _Table:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text in UTF-8: {error}") from error
    first = next((line.lstrip() for line in lines if line.strip()), None)
    if first is None:
        raise ConfigError(f"{path} is empty")
    return _load_json(path, lines) if first[0] in "{[" else _load_csv(path, lines)


def _load_csv(path: Path, lines: list[str]) -> _Table:
    reader = csv.reader(lines)
    try:
        header, *rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: not CSV: {error}") from error
    columns = [column.strip() for column in header[1]]
    known = detect(f"{path}, line {header[0]}", set(columns))
    for line, row in rows:
        if len(row) != len(columns):
            raise ConfigError(f"{path}, line {line}: {counted(len(row), 'column')}, the header has {len(columns)}")
    return _Table("CSV", known, [(line, dict(zip(columns, row, strict=True))) for line, row in rows])


def _load_json(path: Path, lines: list[str]) -> _Table:
    records = [(line, _json_object(path, line, text)) for line, text in enumerate(lines, 1) if text.strip()]
    if str(records[0][1].get("format")).startswith(RECORDING_HEADER):
        del records[0]
    if not records:
        raise ConfigError(f"{path} holds no requests")
    return _Table("JSON lines", detect(f"{path}, line {records[0][0]}", set(records[0][1])), records)


def _json_object(path: Path, line: int, text: str) -> Record:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {line}: not JSON: {error}", hint="one object a line") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path}, line {line}: {text.strip()[:40]!r} is no JSON object", hint="one object a line")
    return cast(Record, record)
