"""What a line of any process's log looks like: text for people, or one JSON object for programs."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
NOT_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    """One JSON object a line: ts, level, logger, worker, message, and whatever `extra` a log call gave."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "worker": self._worker,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in NOT_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(worker: str, level: str, log_format: LogFormat) -> None:
    """Send this process's log to standard error. May be called again, once the format is known."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s {worker} %(name)s: %(message)s")
    handler.setFormatter(JsonLines(worker) if log_format == "json" else text)
    logging.basicConfig(level=level, handlers=[handler], force=True)
