"""Where commands print and write: text for people, JSON for programs, files."""

import json
import os
import sys
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console

from ..protocol.errors import ConfigError


def text_console() -> Console:
    """Return where text for people goes; wide enough for tables when nobody knows the width."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=160)


def print_json(answer: Any) -> None:
    """Print one JSON value; numbers that are not finite become null, which every parser knows."""
    sys.stdout.write(json.dumps(_finite(answer), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def warn(message: str) -> None:
    """Print a warning on standard error, where it does not mix with JSON."""
    Console(stderr=True).print(f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def check_writable(path: Path, flag: str) -> None:
    """Raise ConfigError when no file can be written there; for before minutes are spent on its content."""
    folder = path.absolute().parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "it may not be written"
    else:
        return
    raise ConfigError(
        f"{flag} {path} cannot be written: {reason}", hint="name a file in a folder that exists and belongs to you"
    )


def save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
