"""What a run's directory says once its process has ended."""

import errno
import signal
from dataclasses import dataclass
from pathlib import Path

from app.storage import StorageUnavailable
from dressage.spec.status import Reason
from worker.wire.run_dir import DISK_FULL_EXIT, FAILURE, MANIFEST, FailureFile, Manifest

BY_SIGNAL = 128  # what a parent's exit code adds to the signal that ended its child


class CannotRun(Exception):
    """The work cannot be begun, for a reason that the user should know."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


@dataclass(frozen=True)
class Outcome:
    """A manifest, or why it is missing."""

    manifest: Manifest | None
    reason: Reason = Reason.COMPLETED
    message: str = ""


def ended_by(returncode: int | None) -> int | None:
    """The signal that ended a process, or one of several that it started."""
    if returncode is None or 0 <= returncode <= BY_SIGNAL:
        return None
    number = -returncode if returncode < 0 else returncode - BY_SIGNAL
    return number if number in signal.valid_signals() else None


def read_outcome(run: Path, returncode: int | None, *, memory_was_full: bool) -> Outcome:
    """Read the manifest, else the failure, else judge by how the process ended.

    Args:
        run: Its directory.
        returncode: Negative for a signal.
        memory_was_full: Whether the system has killed processes for memory while it ran.
    """
    if (run / MANIFEST).is_file():
        manifest = Manifest.model_validate_json((run / MANIFEST).read_bytes())
        if manifest.failure:
            return Outcome(manifest, manifest.failure.reason, manifest.failure.message)
        return Outcome(manifest)
    if (run / FAILURE).is_file():
        failure = FailureFile.model_validate_json((run / FAILURE).read_bytes())
        return Outcome(None, failure.reason, failure.message)
    if returncode == DISK_FULL_EXIT:
        return Outcome(None, Reason.DISK_FULL, "the disk of the run directory is full")
    number = ended_by(returncode)
    if number == signal.SIGKILL and memory_was_full:
        return Outcome(
            None,
            Reason.OUT_OF_MEMORY,
            "the training process was killed, as the system does when memory is full; lower "
            "batch_size or max_completion_length",
        )
    if number:
        name = signal.Signals(number).name
        return Outcome(None, Reason.PROCESS_KILLED, f"the process was ended by {name}")
    return Outcome(
        None,
        Reason.INTERNAL_ERROR,
        f"the process ended with exit code {returncode} and gave no reason; see its log",
    )


def outcome_of(error: Exception) -> Outcome:
    """What it means that the supervisor itself could not continue."""
    if isinstance(error, CannotRun):
        return Outcome(None, error.reason, error.message)
    if isinstance(error, StorageUnavailable):
        return Outcome(None, Reason.STORAGE_UNAVAILABLE, f"the artifact store is away: {error}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return Outcome(None, Reason.DISK_FULL, f"the worker's or the store's disk is full: {error}")
    return Outcome(None, Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}"[:1000])


def last_lines(run: Path, count: int) -> str:
    """The end of what the process printed."""
    output = run / "output.log"
    if not output.is_file():
        return ""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - 64_000))
        text = file.read().decode("utf-8", "replace").replace("\x00", "")
    return "\n".join(text.splitlines()[-count:])
