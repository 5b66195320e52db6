"""The artifact store: files under the hash of their content, so equal files are kept once."""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ChecksumMismatch(OSError):
    """What arrived is not what was announced."""


class Storage:
    """A local directory. Every write is whole or not at all; no file is ever changed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, sha256: str) -> Path:
        """Where a stored file lies."""
        return self._root / "objects" / sha256[:2] / sha256

    def put_bytes(self, data: bytes) -> str:
        """Store bytes and return their key."""
        sha256 = hashlib.sha256(data).hexdigest()
        with self._partial() as partial:
            partial.write_bytes(data)
            self._keep(partial, sha256)
        return sha256

    def put_file(self, source: Path, expected_sha256: str) -> None:
        """Copy a file in, checking it on the way.

        Raises:
            ChecksumMismatch: The file is not the announced one; nothing was stored.
        """
        if self.path(expected_sha256).is_file():
            return
        with self._partial() as partial:
            shutil.copyfile(source, partial)
            with partial.open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if actual != expected_sha256:
                raise ChecksumMismatch(f"{source.name}: expected {expected_sha256}, read {actual}")
            self._keep(partial, actual)

    def remove(self, sha256: str) -> None:
        """Forget a file that nothing points to any longer."""
        self.path(sha256).unlink(missing_ok=True)

    @contextmanager
    def _partial(self) -> Iterator[Path]:
        """A place to write to; what is still there in the end is removed, also when it failed."""
        folder = self._root / "partial"
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / uuid.uuid4().hex
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)

    def _keep(self, partial: Path, sha256: str) -> None:
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        target = self.path(sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(target)
