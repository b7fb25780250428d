"""A network for one test alone, in which packets can really be lost: what a proxy cannot do, because it acknowledges.

`own_network` moves the calling thread into a network namespace of its own; threads and processes that it starts are in
it, too. There is no packet filter and no netem to be relied on, but routing rules: what they call a black hole is one.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNET = 0x40000000
OURS = Path("/proc/thread-self/ns/net")


def why_not() -> str | None:
    """Return why there can be no network of one's own here, or None when there can be."""
    if shutil.which("ip") is None:
        return "needs the command `ip` (iproute2)"
    try:
        with own_network():
            return None
    except (PermissionError, subprocess.CalledProcessError) as error:
        return f"needs the right to make a network namespace and its rules: {error}"


@contextmanager
def own_network() -> Iterator[None]:
    """Be in a network with a loopback and nothing else. Raises PermissionError, CalledProcessError."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(OURS, os.O_RDONLY)
    try:
        _check(libc.unshare(CLONE_NEWNET))
        try:
            _ip("link", "set", "lo", "up")
            # The kernel asks the table `local` first; here our own rules come before it.
            _ip("rule", "add", "pref", "10", "table", "local")
            _ip("rule", "del", "pref", "0")
            yield
        finally:
            _check(libc.setns(before, CLONE_NEWNET))
    finally:
        os.close(before)


@contextmanager
def port_is_dead(port: int) -> Iterator[None]:
    """Lose every packet to and from a port; connections there stay as they are, and nobody is told."""
    rules = [("ipproto", "tcp", way, str(port), "blackhole") for way in ("dport", "sport")]
    for rule in rules:
        _ip("rule", "add", "pref", "1", *rule)
    try:
        yield
    finally:
        for rule in rules:
            _ip("rule", "del", "pref", "1", *rule)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _check(result: int) -> None:
    if result != 0:
        raise PermissionError(os.strerror(ctypes.get_errno()))
