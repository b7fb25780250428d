"""What commands print and write: JSON that every parser reads, and files that are refused before they are made."""

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from twinpool.cluster.commands.output import check_writable, print_json
from twinpool.cluster.protocol.errors import ConfigError


def test_numbers_that_are_not_finite_are_null_at_any_depth(capsys: pytest.CaptureFixture[str]) -> None:
    """Python prints NaN and Infinity, which are no JSON."""

    def no_constant(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    print_json({"a": [nan, {"b": (inf, -inf, 1.5)}], "c": "nan"})
    read = json.loads(capsys.readouterr().out, parse_constant=no_constant)
    assert read == {"a": [None, {"b": [None, None, 1.5]}], "c": "nan"}


def test_a_folder_and_a_file_in_no_folder_cannot_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json", "--html")
    with pytest.raises(ConfigError, match=r"--html .* cannot be written: it is a folder\nhint"):
        check_writable(tmp_path, "--html")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_writable(tmp_path / "none" / "new.json", "--html")
    assert list(tmp_path.iterdir()) == []
