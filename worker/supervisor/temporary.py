"""Temporary folders of children, locked by their worker: so the next one knows what is left."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "dressage-run-"


class TemporaryFolder:
    """A folder that is ours for as long as this process lives, or until it is removed.

    Attributes:
        path: Where it is.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self.path.chmod(0o711)  # passable for the user that suites' code runs as
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it with all that is in it. Again it does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def left_behind() -> list[Path]:
    """Folders whose worker is gone; of a worker in another namespace the id says nothing."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if _is_free(path)]


def _is_free(path: Path) -> bool:
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(lock)
        return True
    return False
