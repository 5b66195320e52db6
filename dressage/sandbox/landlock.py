"""Landlock (Linux 5.13): a process gives up what it will never need, by three system calls.

Numbers and structures are those of `linux/landlock.h`; see landlock(7).
"""

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG, PATH_BENEATH = 1, 1
SET_NO_NEW_PRIVS = 38

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
READ = EXECUTE | READ_FILE | READ_DIR
# Which rights the kernel knows grows with its version.
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
CONNECT_AND_BIND, ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3


@functools.cache
def version() -> int:
    """The kernel's Landlock version; 0: it has none."""
    if sys.platform != "linux":
        return 0
    return max(0, _call(CREATE_RULESET, None, 0, VERSION_FLAG))


def restrict(*, read: Iterable[str], write: Iterable[str], network: bool) -> None:
    """Confine this process and all it will start, for ever.

    Args:
        read: Folders and files that may be read and executed.
        write: Folders and devices that may be read and written.
        network: Whether TCP may be used (kernels that can tell: 6.7 and later).

    Raises:
        OSError: The kernel refuses.
    """
    known = version()
    rights = FILE_RIGHTS[max(v for v in FILE_RIGHTS if v <= known)]
    handled = struct.pack("=Q", rights)
    if known >= 4:
        handled += struct.pack("=Q", 0 if network else CONNECT_AND_BIND)
    if known >= 6:
        handled += struct.pack("=Q", ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = _checked(_call(CREATE_RULESET, handled, len(handled), 0))
    for path, allowed in [*((p, READ) for p in read), *((p, rights) for p in write)]:
        _allow(rules, path, allowed & rights)
    _checked(ctypes.CDLL(None, use_errno=True).prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_call(RESTRICT_SELF, rules, 0))
    os.close(rules)


def _allow(rules: int, path: str, allowed: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there: nothing to allow
    if not os.path.isdir(path):
        allowed &= EXECUTE | WRITE_FILE | READ_FILE
    _checked(_call(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", allowed, place), 0))
    os.close(place)


def _call(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result
