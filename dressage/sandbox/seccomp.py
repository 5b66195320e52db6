"""Seccomp: system calls that user code never needs are refused by the kernel.

It covers what Landlock does not: sockets of every family, clocks, other processes' memory, new
namespaces, modes and times of files. Filters are classic BPF programs, see seccomp(2); numbers of
system calls are those of `asm/unistd.h`. Filters add up and last for ever.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable, Sequence

SET_NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCHITECTURE, FIRST, SECOND = 0, 4, 16, 24  # offsets in `struct seccomp_data`
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
X32 = 0x40000000  # a second set of numbers on x86-64

IPV4, IPV6 = 2, 10
STREAM, RAW, KINDS = 1, 3, 0xF
NEW_NAMESPACES = 0x7E020000

# name: (x86-64, aarch64); None: not there.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "prlimit64": (302, 261),
}
_NEVER: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "open_by_handle_at": (304, 265),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "syslog": (103, 116),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
# Their caller falls back on an older way when the kernel does not know them.
_UNKNOWN: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
# Without a user id of its own the code owns our files, and Landlock lets their modes be changed.
_NO_EFFECT: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

Program = list[bytes]


def works() -> bool:
    """Whether we know this machine's system calls, and its kernel takes filters."""
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
        return False
    # A bad address is refused as such only where filters exist.
    result = _library().prctl(SET_SECCOMP, FILTER, None, 0, 0)
    return bool(result == -1 and ctypes.get_errno() == errno.EFAULT)


def restrict(*, network: bool, own_user: bool) -> None:
    """Refuse this process and all it will start what user code never needs.

    Args:
        network: Whether TCP and UDP sockets may be made. Raw ones and those of other families
            (unix, netlink, packet) never; pairs of connected unix sockets always.
        own_user: Whether the process has a user id that owns nothing of ours. Else changes of
            modes, owners and times have no effect.

    Raises:
        OSError: The kernel refuses.
    """
    rules: Program = []
    for names, answer in (
        (_NEVER, errno.EPERM),
        (_UNKNOWN, errno.ENOSYS),
        ({} if own_user else _NO_EFFECT, 0),
    ):
        for number in _here(names.values()):
            rules += _when(number, [_return(ERRNO | answer)])
    refuse, of_kind = _return(ERRNO | errno.EACCES), [_load(SECOND), _step(AND, KINDS)]
    not_raw = [*of_kind, _jump(EQUAL, RAW, 0, 1), refuse, _return(ALLOW)]
    families = [
        part
        for family in ((IPV4, IPV6) if network else ())
        for part in (_jump(EQUAL, family, 0, len(not_raw)), *not_raw)
    ]
    rules += _when(_number("socket"), [_load(FIRST), *families, refuse])
    # Datagram pairs can be aimed at any unix socket; streams stay with their peer.
    stream = [*of_kind, _jump(EQUAL, STREAM, 1, 0), refuse, _return(ALLOW)]
    rules += _when(_number("socketpair"), stream)
    rules += _when(
        _number("clone"),
        [
            _load(FIRST),
            _jump(ANY_BIT, NEW_NAMESPACES, 0, 1),
            _return(ERRNO | errno.EPERM),
            _return(ALLOW),
        ],
    )
    _install(rules)


def protect(processes: Sequence[int]) -> None:
    """Refuse this process and all it will start signals to given ones, and to all at once.

    Args:
        processes: Their ids; also groups of these ids are protected.

    Raises:
        OSError: The kernel refuses.
    """
    targets = [-1, *processes, *(-process for process in processes)]
    refuse = _return(ERRNO | errno.EPERM)
    rules: Program = []
    for name in ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open"):
        checks = [
            part for pid in targets for part in (_jump(EQUAL, pid & 0xFFFFFFFF, 0, 1), refuse)
        ]
        rules += _when(_number(name), [_load(FIRST), *checks, _return(ALLOW)])
    checks = [part for pid in processes for part in (_jump(EQUAL, pid, 0, 1), refuse)]
    rules += _when(_number("prlimit64"), [_load(FIRST), *checks, _return(ALLOW)])
    _install(rules)


def _here(names: Iterable[tuple[int | None, int | None]]) -> list[int]:
    column, _ = _ARCHITECTURES[platform.machine()]
    return [pair[column] for pair in names if pair[column] is not None]  # type: ignore[misc]


def _number(name: str) -> int:
    return _here([_NUMBERS[name]])[0]


def _when(number: int, then: Program) -> Program:
    """`then`, when the system call is this one. `then` ends in a return."""
    return [_load(NUMBER), _jump(EQUAL, number, 0, len(then)), *then]


def _install(rules: Program) -> None:
    _, architecture = _ARCHITECTURES[platform.machine()]
    program = [
        *(_load(ARCHITECTURE), _jump(EQUAL, architecture, 1, 0), _return(KILL)),
        *(_load(NUMBER), _jump(AT_LEAST, X32, 0, 1), _return(ERRNO | errno.ENOSYS)),
        *rules,
        _return(ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    library = _library()
    set_up = library.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if set_up or library.prctl(SET_SECCOMP, FILTER, header, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _load(offset: int) -> bytes:
    return _step(LOAD, offset)


def _return(what: int) -> bytes:
    return _step(RETURN, what)


def _step(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
