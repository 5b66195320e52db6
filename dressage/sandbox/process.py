"""One sandbox process, seen from outside."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

START_TIMEOUT = 60.0
MAX_ANSWER = 64 * 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """What one sandbox process may use."""

    memory_bytes: int = 4 * 1024**3
    file_bytes: int = 64 * 1024**2


class Failure(StrEnum):
    """Why a call has no value."""

    RAISED = "raised"
    ARGUMENTS = "arguments"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"


@dataclass(frozen=True)
class Outcome:
    """What a call gave: a value, or a failure with a message. User code never raises here."""

    value: Any = None
    failure: Failure | None = None
    message: str = ""


class SandboxStartError(RuntimeError):
    """The suite's code could not be loaded; the message is for its author."""


class SandboxProcess:
    """Starts on construction; answers one call at a time; unusable after a timeout or a crash."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "dressage.sandbox.inside", str(folder)),
                *(str(limits.memory_bytes), str(limits.file_bytes)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(folder),
            cwd=folder,
            start_new_session=True,  # its own group: whatever it starts ends with it
        )
        self._unread = b""
        try:
            answer = self._receive(START_TIMEOUT)
        except TimeoutError:
            answer = {"error": "code", "message": f"not loaded within {START_TIMEOUT:g} seconds"}
        if answer is None or "error" in answer:
            self.close()
            raise SandboxStartError(answer["message"] if answer else "the code ended its process")
        self.tools: list[dict[str, Any]] = answer["tools"]
        self.measures: list[str] = answer["measures"]

    @property
    def alive(self) -> bool:
        """Whether it can take another call."""
        return self._process.poll() is None

    def call(self, request: dict[str, Any], timeout: float) -> Outcome:
        """Send one request and wait for its answer, at most `timeout` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.close()
            return Outcome(failure=Failure.CRASHED, message="the process was gone")
        try:
            answer = self._receive(timeout)
        except TimeoutError:
            self.close()
            message = f"no result within {timeout:g} seconds"
            return Outcome(failure=Failure.TIMED_OUT, message=message)
        if answer is None:
            self.close()
            return Outcome(failure=Failure.CRASHED, message="the process ended during the call")
        if "error" in answer:
            return Outcome(failure=Failure(answer["error"]), message=answer["message"])
        return Outcome(value=answer["value"])

    def close(self) -> None:
        """End the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _receive(self, timeout: float) -> dict[str, Any] | None:
        """The next answer, or None when the process ends or talks nonsense.

        Raises:
            TimeoutError: It does neither in time.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        received = bytearray(self._unread)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while (end := received.find(b"\n")) < 0:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk or len(received) > MAX_ANSWER:
                    return None
                received += chunk
        self._unread = bytes(received[end + 1 :])
        try:
            answer: dict[str, Any] = json.loads(received[:end])
        except ValueError:
            return None
        return answer


def _environment(folder: Path) -> dict[str, str]:
    """No secret of the service: what Python needs to start, and nothing else."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
    return {**kept, "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
