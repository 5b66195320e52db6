"""What a process gives up before it loads user code, and each of its workers once more."""

import ctypes
import os
import resource
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dressage.sandbox import landlock, seccomp

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
SET_CHILD_SUBREAPER, KEEP_CAPABILITIES, AMBIENT, RAISE = 36, 8, 47, 2
READ_ANYWHERE = 2  # CAP_DAC_READ_SEARCH
CAPABILITY_VERSION = 0x20080522


@dataclass(frozen=True)
class Confinement:
    """The walls of one sandbox, as they cross to its processes.

    Attributes:
        folder: The suite's code.
        work: Where workers have a folder each.
        memory: Bytes of address space, each.
        file_size: Bytes of one written file.
        disk: Bytes of all that they have written together.
        disk_each: Bytes of one worker's folder.
        processes: How many processes and threads their user may have.
        user: The user id to take; None: stay.
        reads_closed_folders: The user keeps the right to read below folders that are closed to it,
            where Python lies in one; Landlock holds it to the paths it names.
        landlock: Paths they may read, when the kernel is to hold them to it; None: no Landlock.
        seccomp: Whether system calls are filtered.
        network: Whether they may use the network.
    """

    folder: str
    work: str
    memory: int
    file_size: int
    disk: int
    disk_each: int
    processes: int
    user: int | None
    reads_closed_folders: bool
    landlock: list[str] | None
    seccomp: bool
    network: bool


def confine(to: Confinement) -> None:
    """Give everything up."""
    if to.user is not None:
        os.setgroups([])
        os.setgid(to.user)
        if to.reads_closed_folders:
            keep_reading(to.user)
        else:
            os.setuid(to.user)
    os.chdir(to.work)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (to.file_size, to.file_size))
    resource.setrlimit(resource.RLIMIT_AS, (to.memory, to.memory))
    resource.setrlimit(resource.RLIMIT_NPROC, (to.processes, to.processes))
    if to.landlock is not None:
        landlock.restrict(
            read=[*to.landlock, to.folder], write=[to.work, *DEVICES], network=to.network
        )
    if to.seccomp:
        seccomp.restrict(network=to.network, own_user=to.user is not None)


def settle(to: Confinement, folder: Path, protected: Sequence[int]) -> None:
    """Make this process a worker: apart from the others, in a folder of its own.

    Args:
        to: The walls it is behind already.
        folder: Where it may write; made here.
        protected: Processes that it may not signal.
    """
    folder.mkdir(mode=0o700)
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # found again when it is asked for
    # What its own children leave behind stays its own, for as long as it lives.
    become_subreaper()
    if to.landlock is not None:
        landlock.restrict(
            read=[*to.landlock, to.folder], write=[str(folder), *DEVICES], network=to.network
        )
    if to.seccomp:
        seccomp.protect(protected)


def become_subreaper() -> None:
    """Be the parent of all descendants whose own parent ends. See prctl(2)."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def keep_reading(user: int) -> None:
    """Take a user id, and keep the right to read and pass everywhere. See capabilities(7).

    Raises:
        OSError: This process has not got the right.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setuid(user)
    one = 1 << READ_ANYWHERE
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    sets = struct.pack("=6I", one, one, one, 0, 0, 0)
    # Ambient: also what the code starts, another Python for example, can read its own files.
    if library.capset(header, sets) or library.prctl(AMBIENT, RAISE, READ_ANYWHERE, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"capabilities: {os.strerror(code)}")
