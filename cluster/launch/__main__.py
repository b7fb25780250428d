"""`python -m twinpool.cluster.launch`: the launcher process, started by `twinpool up` and by nobody else."""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from ..config import load_spec
from ..log_lines import set_up_logging
from .events import EventPipe
from .ray_session import prepare_environment
from .roles import Programs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m twinpool.cluster.launch", description="Started by `twinpool up`.")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--socket-folder", type=Path, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--lock-fd", type=int, required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    parser.add_argument("--detached", action="store_true")
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--stop-grace", type=float, required=True)
    parser.add_argument("--programs", required=True)
    given = parser.parse_args()
    set_up_logging("launcher", "INFO", load_spec(given.spec).log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.set_inheritable(given.lock_fd, False)  # the lock is to be free the moment this process dies
    prepare_environment(given.address, given.token_file)
    from .launcher import Launcher, LauncherOptions  # imports Ray, which reads the environment just prepared

    options = LauncherOptions(
        spec_file=given.spec,
        run_id=given.run_id,
        socket_folder=given.socket_folder,
        address=given.address,
        is_detached=given.detached,
        timeout_s=given.timeout,
        stop_grace_s=given.stop_grace,
        programs=Programs(**json.loads(given.programs)),
    )
    return Launcher(options, EventPipe(given.events_fd)).run()


sys.exit(main())
