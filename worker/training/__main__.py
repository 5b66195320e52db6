"""`python -m worker.training RUN_DIR`: run a job from its directory, without any server."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from dressage.authoring.errors import AuthoringError
from dressage.spec.status import Reason
from worker.training.failures import RunFailure
from worker.training.run_dir import EventLogHandler, RunDirectory

USAGE = "usage: python -m worker.training RUN_DIR   (RUN_DIR holds spec.json and suite.zip)"


def main() -> int:
    """Run, and translate every way to end badly into a reason. Returns the exit code."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "spec.json").is_file():
        print(USAGE, file=sys.stderr)  # noqa: T201
        return 2
    die_with_parent()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    run = RunDirectory(Path(sys.argv[1]).resolve())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger().addHandler(EventLogHandler(run))
    try:
        from worker.training.pipeline import run_job  # loads torch: after the usage check

        run_job(run)
    except RunFailure as failure:
        run.fail(failure.reason, failure.message)
    except AuthoringError as error:
        run.fail(Reason.SUITE_INVALID, str(error))
    except Exception as error:  # noqa: BLE001  the boundary: whatever happened gets a reason
        traceback.print_exc()
        run.fail(*classified(error))
    else:
        return 0
    return 1


def classified(error: Exception) -> tuple[Reason, str]:
    """The reason for an exception that nobody expected."""
    text = f"{type(error).__name__}: {error}"[:1000]
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return Reason.OUT_OF_MEMORY, f"the memory of the device is full; lower batch_size. {text}"
    if isinstance(error, OSError) and error.errno == 28:
        return Reason.DISK_FULL, f"the disk of the run directory is full. {text}"
    if isinstance(error, ImportError):
        return Reason.MISSING_DEPENDENCY, f"the worker lacks a package: {text}"
    return Reason.INTERNAL_ERROR, text


def die_with_parent() -> None:
    """End when the process that started us ends, so that a killed worker leaves no trainer."""
    if sys.platform == "linux" and os.environ.get("DRESSAGE_PARENT_PID"):
        parent_death_signal = 1
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
        if os.getppid() != int(os.environ["DRESSAGE_PARENT_PID"]):
            sys.exit(1)  # it ended before we could ask


if __name__ == "__main__":
    sys.exit(main())
