"""A request is one line, whatever its caller is called."""

import logging
from typing import Any

import pytest
from twinpool.cluster.log_lines import JsonLines


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_callers_name_cannot_make_lines_of_its_own(
    call: Any, caplog: pytest.LogCaptureFixture, log_format: str
) -> None:
    """Regression: without API keys the `user` of a request stood in the log as it was, line ends included."""
    hostile = "eve\r\n2026-01-01 00:00:00 ERROR all is lost\x1b[31m\x00\u2028\x85é"
    formatter = JsonLines("router") if log_format == "json" else logging.Formatter("%(message)s")
    with caplog.at_level(logging.INFO):
        assert call("POST", "/v1/completions", json={"prompt": "hi", "user": hostile}).status_code == 200
    lines = [formatter.format(record) for record in caplog.records if "outcome" in vars(record)]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert "eve\\r\\n2026-01-01 00:00:00 ERROR all is lost\\" in lines[0]
    assert ("\\u00e9" if log_format == "json" else "é") in lines[0]
