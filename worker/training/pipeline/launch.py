"""A run on several GPUs: one process for each, started by torchrun and ended with this one."""

import argparse
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from worker.wire.run_dir import DISK_FULL_EXIT

KILLED = 128 + signal.SIGKILL


def launch(run: Path, processes: int) -> int:
    """Run `python -m worker.training RUN` in several processes. Returns the exit code."""
    # The processes end with this one, as it ends with the worker.
    os.environ["DRESSAGE_PARENT_PID"] = str(os.getpid())
    try:
        torchrun(
            ["--standalone", "--nproc-per-node", str(processes), "-m", "worker.training", str(run)]
        )
    except ChildFailedError as error:  # a process has said why in the directory, if it could
        codes = {failure.exitcode for failure in error.failures.values()}
        if DISK_FULL_EXIT in codes:
            return DISK_FULL_EXIT
        return KILLED if -signal.SIGKILL in codes else 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--processes", type=int, required=True)
    given = parser.parse_args()
    sys.exit(launch(given.run, given.processes))
