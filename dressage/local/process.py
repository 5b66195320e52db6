"""One program that is kept running, and its process."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dressage.local.account import OURSELVES, Account
from dressage.local.errors import LaunchError

LONGEST_LOG = 50_000_000  # bytes
FIRST_DELAY, LONGEST_DELAY, STEADY_SECONDS = 0.5, 30.0, 60.0


@dataclass(frozen=True)
class Program:
    """What to run, how to tell that it is up, and how to end it. Seconds everywhere.

    `typed` is what it reads from its standard input.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout: float = 20
    ready_timeout: float = 60
    account: Account = OURSELVES
    typed: Path | None = None
    ready: Callable[[], bool] = lambda: True


class SupervisedProcess:
    """A program with its process, restarted with growing delays when it ends."""

    def __init__(self, program: Program, logs: Path) -> None:
        self.program = program
        self._log = logs / f"{program.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._delay = FIRST_DELAY
        self._started = 0.0
        self._restart_at = 0.0

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start it; its output goes to its log."""
        account = self.program.account
        typed = self.program.typed or Path(os.devnull)
        with self._log.open("ab") as log, typed.open("rb") as stdin:
            self._process = subprocess.Popen(
                self.program.command,
                stdin=stdin,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.program.environment},
                user=account.uid,
                group=account.gid,
                extra_groups=None if account.uid is None else [],
                cwd="/" if account.uid is not None else None,
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops all in order
                preexec_fn=_end_with_parent(self.program.stop_signal),
            )
        self._started = time.monotonic()

    def bring_up(self) -> None:
        """Start it, and wait until it is ready.

        Raises:
            LaunchError: It ends, or is not ready in time; with the end of its log.
        """
        self.start()
        deadline = self._started + self.program.ready_timeout
        while not self.program.ready():
            if self.pid is None or time.monotonic() > deadline:
                raise LaunchError(f"{self.program.name} did not come up:\n{self.last_lines()}")
            time.sleep(0.05)

    def keep(self) -> str | None:
        """Restart it if it ended and its delay is over. Returns a line to show, if any."""
        self._rotate()
        if self._process is None or self._process.poll() is None:
            return None
        now = time.monotonic()
        if not self._restart_at:
            if now - self._started > STEADY_SECONDS:
                self._delay = FIRST_DELAY
            self._restart_at = now + self._delay
            code = self._process.returncode
            message = f"{self.program.name} ended ({code}); restarting in {self._delay:g} s"
            self._delay = min(2 * self._delay, LONGEST_DELAY)
            return message
        if now >= self._restart_at:
            self._restart_at = 0.0
            self.start()
        return None

    def stop(self) -> None:
        """Ask it to end, wait, and force it."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(self.program.stop_signal)
        try:
            self._process.wait(self.program.stop_timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _rotate(self) -> None:
        """Begin the log anew when it is long; the one before is kept beside it."""
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > LONGEST_LOG:
                shutil.copyfile(self._log, self._log.with_suffix(".log.1"))
                os.truncate(self._log, 0)  # who writes to it goes on: it is open for appending

    def last_lines(self, count: int = 15) -> str:
        """The end of its log."""
        text = self._log.read_text(errors="replace") if self._log.is_file() else ""
        return "\n".join(text.splitlines()[-count:])


def _end_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """On Linux: be told when the supervisor is killed, so that nothing is left behind."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    parent_death_signal = 1
    return lambda: library.prctl(parent_death_signal, int(number))
