"""A stand-in for both workers: says that it is there by a file in the run folder, then waits.

STAND_IN_EXIT=N in its environment, or N in a file NAME.exit in the run folder, makes it exit with N at once;
STAND_IN_LATE=1 in its environment keeps it from ever being there; STAND_IN_BUSY=1 keeps the router from ending when
asked once.
"""

import json
import os
import signal
import sys

from twinpool.cluster.launch.stop_request import StopRequest
from twinpool.cluster.role import parse_role_arguments

stopped = StopRequest()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
given = parse_role_arguments("worker")
sys.stderr.write(f"{given.name} threads {os.environ['OMP_NUM_THREADS']} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
sys.stderr.flush()
told = given.run_folder / f"{given.name}.exit"
if "STAND_IN_EXIT" in os.environ or told.exists():
    sys.exit(int(os.environ.get("STAND_IN_EXIT") or told.read_text()))
if "STAND_IN_BUSY" in os.environ:
    (given.run_folder / "busy").touch()
here = given.run_folder / f"{given.name}.here"
if "STAND_IN_LATE" not in os.environ:
    partial = here.with_suffix(".partial")
    partial.write_text(json.dumps({"name": given.name, "role": given.name.split("-")[0].upper(), "pid": os.getpid()}))
    partial.replace(here)
while not stopped.wait(0.1):
    pass
here.unlink(missing_ok=True)
