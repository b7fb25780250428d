"""A log line is one line, and as JSON one object with the same names everywhere."""

import json
import logging
from collections.abc import Iterator

import pytest
from twinpool.cluster.log_lines import set_up_logging


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield logging.getLogger("twinpool.test")
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("prompt-0", "INFO", "text")
    set_up_logging("prompt-0", "INFO", "json")
    log.debug("not shown")
    log.info("request %s:\nended", "r1", extra={"request_id": "r1", "ttft_s": 0.5})
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    first, second = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert first.pop("ts").endswith("+00:00")
    assert first == {
        "level": "INFO",
        "logger": "twinpool.test",
        "worker": "prompt-0",
        "message": "request r1:\nended",
        "request_id": "r1",
        "ttft_s": 0.5,
    }
    assert second["level"] == "ERROR"
    assert second["exception"].endswith("ValueError: why")


def test_text_lines(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("router", "WARNING", "text")
    log.info("not shown")
    log.warning("shown", extra={"request_id": "r1"})
    assert capsys.readouterr().err.endswith(" WARNING router twinpool.test: shown\n")
