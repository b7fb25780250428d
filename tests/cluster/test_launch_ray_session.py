"""Joining a Ray that is not there fails at once and says so."""

import socket
import time
from pathlib import Path

import pytest
from twinpool.cluster.launch.ray_session import connect
from twinpool.cluster.protocol.errors import LaunchError


def test_an_address_where_nobody_listens_is_named(tmp_path: Path) -> None:
    """Regression: Ray waited for minutes, and `twinpool up --address` with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"  # bound, but not listening
        began_s = time.monotonic()
        with pytest.raises(LaunchError, match=f"cannot join Ray at {address}: Connection refused"):
            connect(address, "twinpool-test", tmp_path)
    assert time.monotonic() - began_s < 10
