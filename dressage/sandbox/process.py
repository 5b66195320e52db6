"""A suite's code seen from outside: the processes that have loaded it, and their workers."""

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from dressage.sandbox import seccomp
from dressage.sandbox.confine import Confinement
from dressage.sandbox.isolation import (
    NEVER_AS_ROOT,
    Isolation,
    Walls,
    readable_paths,
    strongest,
)
from dressage.spec.chat import ToolFunction

START_TIMEOUT, CLOSE_TIMEOUT = 60.0, 10.0  # seconds
FORK_ATTEMPTS = 3
MAX_ANSWER = 64 * 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """What the processes of a sandbox may use.

    Attributes:
        memory_bytes: Address space of each.
        file_bytes: Size of one file.
        disk_bytes: All their files together; looked at once a second where namespaces cannot hold
            them to it.
        each_disk_bytes: The files of one worker, looked at once a second.
        processes: Processes and threads of their user.
    """

    memory_bytes: int = 4 * 1024**3
    file_bytes: int = 64 * 1024**2
    disk_bytes: int = 256 * 1024**2
    each_disk_bytes: int = 128 * 1024**2
    processes: int = 512


class Failure(StrEnum):
    """Why a call has no value."""

    RAISED = "raised"
    ARGUMENTS = "arguments"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    WRONG_TYPE = "wrong_type"
    OUT_OF_RANGE = "out_of_range"
    MISSING_EXPECTATION = "missing_expectation"
    NO_JUDGEMENT = "no_judgement"


@dataclass(frozen=True)
class Outcome:
    """What a call gave: a value, or a failure with a message. User code never raises here."""

    value: Any = None
    failure: Failure | None = None
    message: str = ""
    printed: str = ""


class SandboxStartError(RuntimeError):
    """The suite's code could not be loaded; the message is for its author."""


class Sandbox:
    """Loads the code on construction; `start_worker` gives processes that run it.

    Attributes:
        tools: Schemas of the tools.
        measures: Names of the measures.
        reward_functions: Names of the reward functions.
        rollout_funcs: Names of the rollout functions.
        environments: Names of the environments with the schemas of their tools.
        walls: The isolation it has.

    Raises:
        SandboxStartError: The code cannot be loaded.
    """

    def __init__(
        self, folder: Path, limits: Limits | None = None, walls: Walls | None = None
    ) -> None:
        self._limits = limits = limits or Limits()
        self.walls = walls or strongest()
        if self.walls.as_root:
            raise SandboxStartError(NEVER_AS_ROOT)
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._work = Path(tempfile.mkdtemp(prefix="dressage-work-"))
        if self.walls.user is not None:
            os.chown(self._work, self.walls.user, self.walls.user)
            folder.chmod(folder.stat().st_mode | 0o055)
        confinement = self._confinement(folder, limits)
        inside = [sys.executable, "-m", "dressage.sandbox.inside", json.dumps(asdict(confinement))]
        with theirs:
            self._process = subprocess.Popen(
                self.walls.command(
                    inside, folder=folder, work=self._work, disk_bytes=limits.disk_bytes
                ),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(self._work),
                start_new_session=True,
            )
        try:
            answer = _LineReader(self._control).next(START_TIMEOUT)
        except TimeoutError:
            answer = {"error": "code", "message": f"not loaded within {START_TIMEOUT:g} seconds"}
        if answer is None or "error" in answer:
            self.close()
            raise SandboxStartError(answer["message"] if answer else "the code ended its process")
        self.tools: list[ToolFunction] = answer["tools"]
        self.measures: list[str] = answer["measures"]
        self.reward_functions: list[str] = answer["reward_functions"]
        self.rollout_funcs: list[str] = answer["rollout_funcs"]
        self.environments: list[dict[str, Any]] = answer["environments"]

    @property
    def contents(self) -> dict[str, Any]:
        """All that was found in the code, by kind."""
        return {
            "tools": self.tools,
            "measures": self.measures,
            "reward_functions": self.reward_functions,
            "rollout_funcs": self.rollout_funcs,
            "environments": self.environments,
        }

    def _confinement(self, folder: Path, limits: Limits) -> Confinement:
        walls = self.walls
        confined = walls.isolation is Isolation.LANDLOCK
        # A limit on processes counts all that the user has, ours included.
        others = 0 if walls.user is not None else _processes_of(os.getuid())
        return Confinement(
            folder=str(folder),
            work=str(self._work),
            memory=limits.memory_bytes,
            file_size=limits.file_bytes,
            disk=limits.disk_bytes,
            disk_each=limits.each_disk_bytes,
            processes=limits.processes + others,
            user=walls.user,
            reads_closed_folders=walls.reads_closed_folders,
            landlock=readable_paths(network=walls.network) if confined else None,
            seccomp=seccomp.works(),
            network=walls.network,
        )

    def start_worker(self) -> "Worker":
        """Have a process forked.

        Raises:
            SandboxStartError: Nobody is there to fork it.
        """
        for _ in range(FORK_ATTEMPTS):  # a loader may die just now: the next one is a new one
            ours, theirs = socket.socketpair()
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            try:
                with theirs, self._lock:
                    socket.send_fds(self._control, [b"w"], [theirs.fileno()])
                return Worker(ours, self)
            except OSError:
                ours.close()
        raise SandboxStartError("the process that holds the suite's code is gone")

    def ended(self) -> None:
        """Have all removed that an ended worker has left behind."""
        with contextlib.suppress(OSError), self._lock:
            self._control.send(b"e")

    def why_ended(self) -> str:
        """Why workers have just ended, as far as the sandbox has ended them itself."""
        with contextlib.suppress(OSError), self._lock:
            told = self._control.recv(1024, socket.MSG_DONTWAIT)
            if b"each" in told:
                size = self._limits.each_disk_bytes // 1_000_000
                return f"the process had more than {size} MB of files"
            if b"disk" in told:
                size = self._limits.disk_bytes // 1_000_000
                return f"the suite's code has more than {size} MB of files"
        return "the process ended during the call"

    def close(self) -> None:
        """End all processes. The guard does it; if it does not, it is ended itself."""
        self._control.close()
        try:
            self._process.wait(CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._work, ignore_errors=True)


class Worker:
    """Answers one call at a time; unusable after a timeout or a crash."""

    def __init__(self, connection: socket.socket, sandbox: Sandbox) -> None:
        self._connection, self._sandbox = connection, sandbox
        self._lines = _LineReader(connection)
        self.pid = self._sender()
        if self._lines.next(START_TIMEOUT) is None:
            raise OSError("the worker ended at once")
        self.alive = True

    def _sender(self) -> int:
        """The process at the other end, as the kernel says: its own word is worth nothing, and in
        a namespace it does not know its number.
        """
        self._connection.settimeout(START_TIMEOUT)
        size = struct.calcsize("3i")
        _, ancillary, _, _ = self._connection.recvmsg(
            1, socket.CMSG_SPACE(size), socket.MSG_PEEK | socket.MSG_WAITALL
        )
        self._connection.settimeout(None)
        if not ancillary:
            raise OSError("the worker ended at once")
        process, _, _ = struct.unpack("3i", ancillary[0][2][:size])
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return int(process)

    def call(
        self,
        request: dict[str, Any],
        timeout: float,
        answer_question: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Outcome:
        """Send one request and wait for its answer.

        Args:
            request: What to do.
            timeout: Seconds the code may take; a question of its own starts them again.
            answer_question: Answers what the code asks meanwhile, as rollout functions do.
        """
        if not self.alive:
            return Outcome(failure=Failure.CRASHED, message="the process is gone")
        # What was written before it was asked answers nothing.
        call_id = secrets.token_hex(8)
        try:
            self._send({**request, "id": call_id})
            answer = self._answer_to(call_id, timeout)
            while answer and "question" in answer and answer_question:
                self._send({"reply": answer_question(answer["question"])})
                answer = self._answer_to(call_id, timeout)
        except TimeoutError:
            self.kill()
            message = f"no result within {timeout:g} seconds"
            return Outcome(failure=Failure.TIMED_OUT, message=message)
        except OSError:
            answer = None
        if answer is None:
            self.kill()
            return Outcome(failure=Failure.CRASHED, message=self._sandbox.why_ended())
        outcome = _outcome(answer, request["call"])
        if outcome and isinstance(answer.get("printed"), str):
            outcome = replace(outcome, printed=answer["printed"])
        if outcome is None:
            self.kill()
            return Outcome(failure=Failure.CRASHED, message="the process does not keep to its form")
        return outcome

    def _answer_to(self, call_id: str, timeout: float) -> dict[str, Any] | None:
        """The next message; an empty one when it belongs to no call of ours."""
        answer = self._lines.next(timeout)
        return answer if answer is None or answer.get("id") == call_id else {}

    def _send(self, content: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(content).encode() + b"\n")

    def kill(self) -> None:
        """End the process and everything it started."""
        if self.alive:
            self.alive = False
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._connection.close()
            self._sandbox.ended()


def _outcome(answer: dict[str, Any], call: str) -> Outcome | None:
    """What an answer says; None when it is none of ours: user code can write to its socket, too."""
    if "error" in answer:
        known = answer["error"] in list(Failure) and isinstance(answer.get("message"), str)
        return (
            Outcome(failure=Failure(answer["error"]), message=answer["message"]) if known else None
        )
    if "value" not in answer:
        return None
    value = answer["value"]
    return Outcome(value=value) if _fits(call, value) else None


def _fits(call: str, value: Any) -> bool:
    if call in ("measure", "builtin"):
        return (
            isinstance(value, dict)
            and isinstance(value.get("reason"), str)
            and isinstance(value.get("value"), float | int)
            and 0 <= value["value"] <= 1
            and value.get("passed") in (None, True, False)
        )
    if call == "tool":
        return isinstance(value, str)
    if call == "open":
        return value is None or isinstance(value, str)
    if call == "reward_function":
        return (
            isinstance(value, dict)
            and isinstance(value.get("rewards"), list)
            and isinstance(value.get("metrics"), dict)
            and all(v is None or isinstance(v, float | int) for v in value["rewards"])
            and all(isinstance(v, float | int) for v in value["metrics"].values())
        )
    if call == "snapshot":
        return isinstance(value, str)
    if call == "rollout_func":
        return isinstance(value, dict)
    if call == "render":
        return isinstance(value, list) and all(isinstance(text, str) for text in value)
    return value is None


class _LineReader:
    """Whole JSON lines out of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def next(self, timeout: float) -> dict[str, Any] | None:
        """The next line, or None when the other side ends or talks nonsense.

        Raises:
            TimeoutError: It does neither in time.
        """
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while (end := self._received.find(b"\n")) < 0:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                chunk = self._connection.recv(1 << 16)
                if not chunk or len(self._received) > MAX_ANSWER:
                    return None
                self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None


def _environment(work: Path) -> dict[str, str]:
    """No secret of the service: what Python needs to start, and nothing else."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
    return {
        **kept,
        **dict.fromkeys(("HOME", "TMPDIR"), str(work)),
        # Hashes of texts, and with them the order of sets, are the same in every process.
        **{"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
    }


def _processes_of(user: int) -> int:
    """Threads of a user, as the kernel counts them against a limit."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == user:
                count += len(list((process / "task").iterdir()))
    return count
