"""The processes of a sandbox: `python -m dressage.sandbox.inside CONFINEMENT`.

Three kinds, each the parent of the next:

- the guard holds no user code and is out of its reach: it ends what outlives its worker, starts a
  loader that has died again, and ends everything when its host is gone;
- the loader confines itself, loads the code and says what is in it: forking is cheap where
  importing is not, so that every environment can have a process to itself;
- a worker answers the calls that come over a socket of its own.

The host speaks to the guard over its standard input: a message with a socket is for a new worker,
one without says that a worker was ended. What user code prints goes nowhere.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path

from dressage.sandbox.confine import Confinement, become_subreaper, confine, settle
from dressage.sandbox.loading import CodeError, load_code
from dressage.sandbox.worker import Worker, send

LOOK_SECONDS = 1.0


class Guard:
    """Keeps one loader, and order among what it and its workers leave."""

    def __init__(self, host: socket.socket, confinement: Confinement) -> None:
        self._host, self._confinement = host, confinement
        self._loader = 0
        self._to_loader: socket.socket | None = None

    def run(self) -> None:
        """Until the host is gone, or the code does not load."""
        become_subreaper()
        try:
            if self._start_loader(self._host):
                self._guard()
        finally:
            self._end_everything()

    def _start_loader(self, announce: socket.socket | None) -> bool:
        ours, theirs = socket.socketpair()
        guard = os.getpid()
        self._loader = os.fork()
        if self._loader == 0:
            ours.close()
            self._host.close()
            with contextlib.suppress(KeyboardInterrupt):
                _load_and_fork(theirs, self._confinement, guard)
            os._exit(0)
        theirs.close()
        with ours.makefile("rb") as lines:
            contents = lines.readline()
        self._to_loader = ours
        if announce:
            announce.sendall(contents)
        return bool(contents) and not contents.startswith(b'{"error"')

    def _guard(self) -> None:
        while True:
            readable, _, _ = select.select([self._host], [], [], LOOK_SECONDS)
            if readable:
                message, descriptors, _, _ = socket.recv_fds(self._host, 1, 1)
                if not message:
                    return  # the host is gone
                for descriptor in descriptors:
                    self._pass_on(descriptor)
            self._end_orphans()
            if not readable:
                self._look_at_disk()

    def _look_at_disk(self) -> None:
        """End the worker that fills its folder, or all when they fill the disk together."""
        work = Path(self._confinement.work)
        # By process, not by folder: a suite's import may have made folders of any name.
        for worker in _children(self._loader):
            folder = work / worker_folder(worker)
            if not folder.is_symlink() and _size(folder) > self._confinement.disk_each:
                self._host.sendall(b"each")
                _kill_group(worker)
        if _size(work) > self._confinement.disk:
            self._host.sendall(b"disk")
            self._end_everything()

    def _pass_on(self, descriptor: int) -> None:
        """Have a worker forked for this socket, by a new loader if need be."""
        if not _is_running(self._loader) and not self._start_loader(None):
            os.close(descriptor)  # the host sees that nobody is there
            return
        assert self._to_loader
        with contextlib.suppress(OSError):
            socket.send_fds(self._to_loader, [b"w"], [descriptor])
        os.close(descriptor)

    def _end_orphans(self) -> None:
        """What has become our child though we did not start it has outlived its worker."""
        while orphans := [child for child in _children(os.getpid()) if child != self._loader]:
            for orphan in orphans:
                _kill(orphan)
        # The folders first: who makes one after this look is not among those that are compared.
        folders = list(Path(self._confinement.work).glob(worker_folder("*")))
        needed = {worker_folder(child) for child in _children(self._loader)}
        for folder in folders:
            if folder.name not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    def _end_everything(self) -> None:
        _kill(self._loader)
        self._loader = 0
        self._end_orphans()


def _load_and_fork(control: socket.socket, confinement: Confinement, guard: int) -> None:
    confine(confinement)
    try:
        code = load_code(Path(confinement.folder))
    except CodeError as error:
        send(control, {"error": "code", "message": str(error)})
        return
    send(control, code.contents())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    loader = os.getpid()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return  # the guard is gone
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()  # its own group: most of what it starts ends with it at once
            folder = Path(confinement.work) / worker_folder(os.getpid())
            settle(confinement, folder, (guard, loader))
            Worker(code, socket.socket(fileno=descriptors[0])).serve()
        os.close(descriptors[0])


def worker_folder(process: int | str) -> str:
    """The name of a worker's folder."""
    return f"worker-{process}"


def _children(process: int) -> list[int]:
    """Direct children of a process with one thread."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
        return [int(child) for child in text.split()]
    return []


def _is_running(child: int) -> bool:
    try:
        return child > 0 and os.waitpid(child, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _kill(child: int) -> None:
    if child > 0:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _size(folder: Path) -> int:
    """Bytes on disk of all that lies below a folder."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def main() -> None:
    """Be the guard."""
    host = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    Guard(host, Confinement(**json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
