"""How a supervisor learns at once that its launcher is dead: a file that the launcher keeps locked while it lives.

The kernel frees the lock however the launcher ends. Ray notices a lost driver too, but seconds later.
"""

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO


def hold(lifeline: Path) -> IO[bytes]:
    """Lock the file; keep what is returned open for as long as this process is to count as alive."""
    held = lifeline.open("wb")
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


def watch(lifeline: Path, when_cut: Callable[[], None]) -> None:
    """Call `when_cut`, in a thread of its own, once nobody holds the file any more or it is gone."""

    def wait() -> None:
        try:
            with lifeline.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        except FileNotFoundError:
            pass  # the launcher cleaned up, which it does last
        when_cut()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
