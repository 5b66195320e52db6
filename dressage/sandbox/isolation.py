"""How user code is kept apart from the machine: the strongest way this host allows.

bubblewrap (namespaces), else Landlock with a filter of system calls, else limits alone. Run as
root, the processes have a user id of their own: user code is never root. docs/security.md says what
each of them holds.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dressage.sandbox import landlock, seccomp

# Below systemd's dynamic users, above what distributions give to people and services.
FIRST_USER, USERS = 60_600, 500
# To give the code another user id, to end it, to remove its files.
GUARD_CAPABILITIES = tuple(
    part
    for name in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_DAC_OVERRIDE", "CAP_FOWNER")
    for part in ("--cap-add", name)
)
PROBE_SECONDS, PROBE_PREFIX = 20.0, "DRESSAGE_PROBE_"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl", "/etc/ld.so.cache")
NAME_SERVICE = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")


NEVER_AS_ROOT = (
    "the suite's code would run as root: its own user cannot reach this Python; install "
    "bubblewrap, or Python where everybody can read it"
)


class Isolation(StrEnum):
    """What stands between user code and the machine, strongest first."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    LIMITS = "limits"


@dataclass(frozen=True)
class Walls:
    """One sandbox's isolation.

    Attributes:
        isolation: The kind.
        user: The user id its processes run as; None: the one of this process.
        network: Whether they may use the network.
        reads_closed_folders: The user reads, where Landlock lets it, also what is closed to it:
            this Python lies there.
    """

    isolation: Isolation
    user: int | None
    network: bool
    reads_closed_folders: bool = False

    @property
    def as_root(self) -> bool:
        """Whether user code would be root."""
        return os.getuid() == 0 and self.user is None

    def __str__(self) -> str:
        user = "" if os.getuid() else ", as its own user" if self.user else ", as root"
        filtered = "" if seccomp.works() else ", system calls not filtered"
        open_network = self.network or (self.isolation is Isolation.LIMITS and not seccomp.works())
        return f"{self.isolation}{user}{', with network' if open_network else ''}{filtered}"

    def command(self, inside: list[str], *, folder: Path, work: Path, disk_bytes: int) -> list[str]:
        """The command line that runs `inside` behind these walls."""
        if self.isolation is not Isolation.BUBBLEWRAP:
            return inside
        bound = [*readable_paths(network=self.network), str(folder)]
        root = os.getuid() == 0
        # Parents that bubblewrap makes by itself are closed to other users.
        parents = sorted(
            {str(up) for path in [*bound, str(work)] for up in list(Path(path).parents)[:-1]}
        )
        return [
            *("bwrap", "--die-with-parent"),
            *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
            *(() if self.network else ("--unshare-net",)),
            *("--cap-drop", "ALL"),
            *(GUARD_CAPABILITIES if root else ()),
            *(() if root else ("--unshare-user",)),
            *(part for path in parents for part in ("--dir", path)),
            *(part for path in bound for part in ("--ro-bind-try", path, path)),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--perms", "1777", "--size", str(disk_bytes), "--tmpfs", str(work)),
            *("--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/dev", "--remount-ro", "/"),
            *("--chdir", str(work)),
            *inside,
        ]


def strongest(*, network: bool = False, atmost: Isolation = Isolation.BUBBLEWRAP) -> Walls:
    """The strongest isolation that works here.

    Args:
        network: Whether the code may use the network.
        atmost: Nothing stronger than this is tried.
    """
    root = os.getuid() == 0
    if atmost is Isolation.BUBBLEWRAP and _bubblewrap_works():
        return Walls(Isolation.BUBBLEWRAP, _own_user() if root else None, network)
    holds = atmost is not Isolation.LIMITS and landlock.version() > 0 and seccomp.works()
    isolation = Isolation.LANDLOCK if holds else Isolation.LIMITS
    if not root:
        return Walls(isolation, None, network)
    if _python_is_reachable(FIRST_USER):
        return Walls(isolation, _own_user(), network)
    # Only behind Landlock: it names the paths that may be read.
    if holds and _can_keep_reading(FIRST_USER):
        return Walls(isolation, _own_user(), network, reads_closed_folders=True)
    return Walls(isolation, None, network)


def too_weak(minimum: Isolation) -> str | None:
    """Why this host may not run user code, if the operator accepts nothing below the minimum."""
    walls = strongest()
    if walls.as_root:
        return NEVER_AS_ROOT
    order = list(Isolation)
    if order.index(walls.isolation) > order.index(minimum):
        return (
            f"this host holds user code by {walls.isolation} alone, and DRESSAGE_MINIMUM_ISOLATION "
            f"is {minimum}: install bubblewrap, use Linux 5.13 or later with Landlock, or, where "
            "all who submit are trusted with this host, set DRESSAGE_MINIMUM_ISOLATION=limits"
        )
    return None


def readable_paths(*, network: bool) -> list[str]:
    """What Python and the code of a suite need to read, and nothing else."""
    python = {sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[1])}
    python |= {
        entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")
    }
    return [*SYSTEM, *(NAME_SERVICE if network else ()), *sorted(python)]


def _own_user() -> int:
    """Another one for each sandbox of this process tree, as far as they reach."""
    return FIRST_USER + int.from_bytes(os.urandom(4), "big") % USERS


def _bubblewrap_works() -> bool:
    return _probed("BUBBLEWRAP", _try_bubblewrap)


def _python_is_reachable(user: int) -> bool:
    """Whether another user can start this Python, which root may have in a closed home."""
    return _probed("REACHABLE", lambda: _try_as(user))


def _can_keep_reading(user: int) -> bool:
    """Whether this root may give another user the right to read everywhere."""
    return _probed("READING", lambda: _try_reading(user))


def _probed(name: str, probe: Callable[[], bool]) -> bool:
    """What a probe has found: it takes a second, and the host stays the same for our children."""
    variable = f"{PROBE_PREFIX}{name}"
    if variable not in os.environ:
        os.environ[variable] = "yes" if probe() else "no"
    return os.environ[variable] == "yes"


def _try_bubblewrap() -> bool:
    if shutil.which("bwrap") is None:
        return False
    walls = Walls(Isolation.BUBBLEWRAP, None, network=False)
    with tempfile.TemporaryDirectory() as work:
        command = walls.command(
            [sys.executable, "-c", "import dressage"],
            folder=Path(work),
            work=Path(work),
            disk_bytes=1 << 20,
        )
        try:
            done = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
    return done.returncode == 0


def _try_as(user: int) -> bool:
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import dressage, pydantic"],
            user=user,
            group=user,
            extra_groups=[],
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _try_reading(user: int) -> bool:
    code = f"from dressage.sandbox.confine import keep_reading; keep_reading({user})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
