"""Room on the disk, before anything is written."""

import shutil
from pathlib import Path

from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure


def require_room(folder: Path, needed: int, what: str) -> None:
    """Check that so many bytes can be written.

    Raises:
        RunFailure: They cannot.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunFailure(
            Reason.DISK_FULL,
            f"{what} needs up to {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
        )
