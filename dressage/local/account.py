"""Database servers refuse to run as root: as root they run as `nobody`.

No user is created, and no mode of a directory that is not ours is changed.
"""

import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path

from dressage.local.errors import LaunchError


@dataclass(frozen=True)
class Account:
    """Who runs the database servers. None: the user we are."""

    uid: int | None
    gid: int | None

    def give(self, path: Path) -> None:
        """Make a file or directory of ours theirs."""
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)


OURSELVES = Account(None, None)


def database_account() -> Account:
    """`nobody` when we are root, else ourselves."""
    if os.geteuid() != 0:
        return OURSELVES
    entry = pwd.getpwnam("nobody")
    return Account(entry.pw_uid, entry.pw_gid)


def require_reachable(account: Account, directory: Path) -> None:
    """A data directory that `nobody` can get to.

    Raises:
        LaunchError: A directory above it is closed, and it is not ours to open.
    """
    if account.uid is not None and not _open_to_all(directory.parent):
        raise LaunchError(
            f"as root the databases run as 'nobody', who cannot reach {directory}; choose another "
            "data directory with --data-dir, below /var/lib for example"
        )


def reachable_copy(account: Account, folder: Path, copies: Path) -> Path:
    """The folder itself, or a copy that the account can reach (binaries below root's home)."""
    if account.uid is None or _open_to_all(folder):
        return folder
    copy = copies / folder.name
    if not copy.exists():
        partial = copies / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(folder, partial, symlinks=True)
        partial.rename(copy)
    return copy


def _open_to_all(path: Path) -> bool:
    path = path.resolve()
    return all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents) if parent.exists())
