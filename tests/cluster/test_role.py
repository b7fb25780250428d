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


@pytest.mark.parametrize("more", [("--control", "ipc://y"), ("--control", "ipc://y , ipc://z")])
def test_a_worker_may_have_several_routers(tmp_path: Path, more: tuple[str, ...]) -> None:
    assert parse_role_arguments("decode_worker", flags(tmp_path)).control == ("ipc://x",)
    given = parse_role_arguments("prefill_worker", flags(tmp_path, *more))
    assert given.control == ("ipc://x", *more[1].split(" , "))


@pytest.mark.parametrize("again", ["ipc://x", "ipc://y,ipc://y", "ipc://y,", ""])
def test_a_router_named_twice_or_not_at_all_is_an_error(tmp_path: Path, again: str) -> None:
    with pytest.raises(ConfigError, match=f"--control ipc://x,{again} names an address twice, or an empty one"):
        parse_role_arguments("decode_worker", flags(tmp_path, "--control", again))


def test_a_router_has_one_control_socket(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--control ipc://x,ipc://y: a router has one control socket"):
        parse_role_arguments("router", flags(tmp_path, "--control", "ipc://y"))
