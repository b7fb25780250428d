"""The `twinpool` command with stand-ins for the roles: `python -m stand_ins.cli up …`."""

import sys

from twinpool.cluster.cli import build_app, run
from twinpool.cluster.launch.roles import Programs

WORKER = "stand_ins.worker"

sys.exit(run(build_app(Programs(router="stand_ins.router", prompt=WORKER, completion=WORKER, fetch="stand_ins.fetch"))))
