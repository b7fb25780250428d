"""Loaded by Python at the start of every role process of a live cluster: notes what could run code found in data.

Only once the process is ready, which whoever runs the cluster says by a file. Modules from the disk, and what they
generate while they are imported (a named tuple, say), are no such code; nor is a line of them that is parsed, not run,
to be shown in a traceback. Notes go to `PID.audit` in the folder of the environment variable; without one nothing is
noted. Python loads one module of this name only: a test that wants another loaded as well names it in TWINPOOL_ALSO.
"""

import importlib
import os
import sys
import traceback
from typing import Any

FOLDER = os.environ.get("TWINPOOL_AUDIT_FOLDER")
STARTS_A_PROGRAM = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"}
RUNS_CODE = {"compile", "exec"}
WATCHED = {"pickle.find_class", *STARTS_A_PROGRAM, *RUNS_CODE}


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in WATCHED and os.path.exists(f"{FOLDER}/{os.getpid()}.ready") and not is_of_a_file(event, arguments):
        with open(f"{FOLDER}/{os.getpid()}.audit", "a") as file:
            file.write(f"{event} {arguments!r:.300}\n")


def is_of_a_file(event: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether it is code that Python found in a module on the disk."""
    if event not in RUNS_CODE:
        return False
    name = arguments[1] if event == "compile" else getattr(arguments[0], "co_filename", None)
    name = os.fsdecode(name) if isinstance(name, str | bytes) else ""
    return name.startswith("<frozen ") or os.path.isfile(name) or is_importing() or is_shown(event)


def is_importing() -> bool:
    """Return whether this thread is in the middle of an import."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" and frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def is_shown(event: str) -> bool:
    """Return whether a line is parsed for a traceback."""
    frame = sys._getframe(1)
    while event == "compile" and frame is not None:
        if frame.f_code.co_filename == traceback.__file__:
            return True
        frame = frame.f_back
    return False


if FOLDER is not None:
    sys.addaudithook(note)
if "TWINPOOL_ALSO" in os.environ:
    importlib.import_module(os.environ["TWINPOOL_ALSO"])
