"""The outermost layer of a run's process: every way to end badly becomes a reason."""

import contextlib
import ctypes
import errno
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from dressage.authoring.errors import AuthoringError
from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure
from worker.wire.run_dir import DISK_FULL_EXIT, STACKS, EventLogHandler, RunDirectory

# As CUDA, its libraries and NCCL write it into exceptions that have no type of their own.
GPU_FAULTS = ("CUDA error", "CUBLAS_STATUS", "cuBLAS", "CUDNN_STATUS", "cuDNN error", "NCCL", "ECC")


def run_process(path: Path, work: Callable[[RunDirectory], None]) -> int:
    """Do the work of a run directory. Returns the exit code: 0 with a manifest, else 1."""
    die_with_parent()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    run = RunDirectory(path.resolve(), rank=int(os.environ.get("RANK", "0")))
    # Whoever started the run asks with this signal what its threads are doing.
    stacks = (path / STACKS.format(pid=os.getpid())).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger().addHandler(EventLogHandler(run))
    try:
        work(run)
    except RunFailure as failure:
        return _failed(run, failure.reason, failure.message)
    except AuthoringError as error:
        return _failed(run, Reason.SUITE_INVALID, str(error))
    except Exception as error:  # noqa: BLE001  the boundary: whatever happened gets a reason
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return _failed(run, *_classified(error))
    return 0


def _failed(run: RunDirectory, reason: Reason, message: str) -> int:
    try:
        run.fail(reason, message)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return DISK_FULL_EXIT
        raise
    return 1


def _classified(error: Exception) -> tuple[Reason, str]:
    text = f"{type(error).__name__}: {error}"[:1000]
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return Reason.OUT_OF_MEMORY, f"the memory of the device is full; lower batch_size. {text}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return Reason.DISK_FULL, f"the disk of the run directory is full. {text}"
    if isinstance(error, RuntimeError) and any(word in str(error) for word in GPU_FAULTS):
        return Reason.GPU_FAILED, f"the GPU, or the way to another one, failed. {text}"
    if isinstance(error, ImportError):
        return Reason.MISSING_DEPENDENCY, f"the worker lacks a package: {text}"
    return Reason.INTERNAL_ERROR, text


def die_with_parent() -> None:
    """End when the process that started us ends, so that a killed worker leaves no trainer."""
    parent = os.environ.get("DRESSAGE_PARENT_PID")
    if sys.platform == "linux" and parent:
        parent_death_signal = 1
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
        if os.getppid() != int(parent):
            sys.exit(1)  # it ended before we could ask
