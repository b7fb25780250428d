"""A stand-in for twinpool.engine.fetch: makes an empty folder, or fails for the model "missing"."""

import sys
import tempfile
from pathlib import Path

if sys.argv[1] == "missing":
    sys.exit("no such model: missing")
folder = Path(tempfile.gettempdir()) / "stand-in-model"
folder.mkdir(exist_ok=True)
sys.stderr.write("fetching\n")
sys.stdout.write(f"{folder}\n")
