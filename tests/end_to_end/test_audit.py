"""The watch over role processes sees what it is there for: every other test that ends a live cluster relies on it."""

import os
import subprocess
import sys
from pathlib import Path

from live_cluster import AUDITED

EARLY = """
import os, pickle, subprocess, sys
canary = pickle.dumps(os.path.join)
pickle.loads(canary); exec("1")
"""
READY = "open(f'{os.environ[\"TWINPOOL_AUDIT_FOLDER\"]}/{os.getpid()}.ready', 'w').close()\n"
HARMLESS = """
import colorsys, json, stray  # modules from the disk, compiled and not
json.loads("[1]"); pickle.loads(pickle.dumps([1, "two"]))
"""
HARMFUL = """
pickle.loads(canary)
exec("2")
eval("3")
os.system("true")
subprocess.run(["true"])
"""


def noted(folder: Path, source: str) -> list[str]:
    (folder / "stray.py").write_text("import collections\nPoint = collections.namedtuple('Point', 'x y')\n")
    environment = {**os.environ, "PYTHONPATH": f"{AUDITED}{os.pathsep}{folder}", "TWINPOOL_AUDIT_FOLDER": str(folder)}
    subprocess.run([sys.executable, "-c", source], env=environment, check=True, timeout=60)
    return [line.split()[0] for path in folder.glob("*.audit") for line in path.read_text().splitlines()]


def test_what_runs_code_after_the_start_is_noted_and_nothing_else(tmp_path: Path) -> None:
    assert noted(tmp_path, EARLY + READY + HARMLESS) == []
    events = noted(tmp_path, EARLY + READY + HARMFUL)
    assert [event for i, event in enumerate(events) if event not in events[:i]] == [
        "pickle.find_class",
        "compile",
        "exec",
        "os.system",
        "subprocess.Popen",
    ]
    assert events.count("exec") == 2, "exec and eval"
