"""The flags that every role program reads."""

from pathlib import Path

import pytest
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.role import parse_role_arguments


def flags(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "spec.json").write_text("{}")
    return ["--spec", str(tmp_path / "spec.json"), "--model-folder", str(tmp_path), "--control", "ipc://x", *more]


def test_where_others_reach_a_worker_can_be_told(tmp_path: Path) -> None:
    given = parse_role_arguments(
        "decode_worker", flags(tmp_path, "--data-port", "5600", "--advertise", "tcp://10.0.0.7:5600")
    )
    assert (given.data_port, given.advertise) == (5600, "tcp://10.0.0.7:5600")
    plain = parse_role_arguments("decode_worker", flags(tmp_path))
    assert (plain.data_port, plain.advertise) == (0, None)


def test_an_address_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--advertise ipc:///tmp/x is not of the form tcp://HOST:PORT"):
        parse_role_arguments("decode_worker", flags(tmp_path, "--advertise", "ipc:///tmp/x"))
