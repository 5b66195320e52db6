"""`dressage up`: start all, keep all, stop all in order."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx

from dressage.stack.account import database_account, require_reachable
from dressage.stack.errors import StackError
from dressage.stack.program import KeptProgram, Program
from dressage.stack.servers import Postgres, Valkey, run_directory

POLL_SECONDS = 0.2
Say = Callable[[str], None]


@dataclass(frozen=True)
class StackOptions:
    """What `dressage up` is told. Servers given by address are used, not started."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8400
    database_url: str | None = None
    redis_url: str | None = None
    storage: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The address of the API, from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"


def default_data_dir() -> Path:
    """Below /var/lib for root, else where this user's data belongs."""
    if os.geteuid() == 0:
        return Path("/var/lib/dressage")
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "dressage"


class Stack:
    """The processes of one data directory."""

    def __init__(self, options: StackOptions, say: Say) -> None:
        self._options, self._say = options, say
        self._kept: list[KeptProgram] = []
        self._lock_file: int | None = None
        self._stopping = False

    def start(self) -> None:
        """Bring everything up, in order.

        Raises:
            StackError: Something is in the way; what was started is stopped.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        options = self._options
        account = database_account()
        root = options.data_dir.resolve()
        _make_directory(root)
        self._lock(root)
        _require_free_port(options.host, options.port)
        for name in ("logs", "artifacts", "runs", "programs"):
            (root / name).mkdir(exist_ok=True)
        self._logs = root / "logs"
        database_url, redis_url = options.database_url, options.redis_url
        if not database_url or not redis_url:
            require_reachable(account, root)
            run_directory(root, account)
        if not database_url:
            postgres = Postgres(root, account)
            postgres.initialise()
            self._bring_up(postgres.program())
            postgres.create_database()
            database_url = postgres.url
        if not redis_url:
            valkey = Valkey(root, account)
            self._bring_up(valkey.program())
            redis_url = valkey.url
        environment = {
            "DRESSAGE_DATABASE_URL": database_url,
            "DRESSAGE_REDIS_URL": redis_url,
            "DRESSAGE_STORAGE": options.storage or str(root / "artifacts"),
            "DRESSAGE_RUNS_DIR": str(root / "runs"),
            **options.environment,
        }
        _run_module("app.check_storage", environment)
        self._say("migrating the database")
        _run_module("app.db.migrate", environment)
        self._first_key = _run_module("app.auth.first_key", environment).strip() or None
        self._environment = environment
        for program in _service_programs(options, environment):
            self._bring_up(program)

    def missing_key(self, known: str | None) -> str | None:
        """An operator key for a user whose own one is not of this service, else None.

        Whoever may start the service on its data directory may run it.
        """
        if self._first_key:
            return self._first_key
        headers = {"Authorization": f"Bearer {known}"}
        answer = httpx.get(f"{self._options.url}/keys/mine", headers=headers, timeout=10)
        if known and answer.status_code == httpx.codes.OK:
            return None
        return _run_module("app.auth.first_key", self._environment, "--new").strip()

    def run_until_stopped(self) -> None:
        """Restart what crashes until SIGTERM or SIGINT, then stop all."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked_to_stop)
        try:
            while not self._stopping:
                self.keep()
                time.sleep(POLL_SECONDS)
            self._say("stopping")
        finally:
            self.stop()

    def keep(self) -> None:
        """Look once after every program."""
        for kept in self._kept:
            line = kept.keep()
            if line:
                self._say(line)

    def stop(self) -> None:
        """Stop everything, last started first."""
        while self._kept:
            self._kept.pop().stop()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _bring_up(self, program: Program) -> None:
        self._say(f"starting {program.name}")
        kept = KeptProgram(program, self._logs)
        kept.start()
        self._kept.append(kept)
        deadline = time.monotonic() + program.ready_timeout
        while not program.ready():
            if kept.pid is None or time.monotonic() > deadline:
                raise StackError(f"{program.name} did not come up:\n{kept.last_lines()}")
            time.sleep(0.05)

    def _lock(self, root: Path) -> None:
        self._lock_file = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(
                f"the data directory {root} is in use by another `dressage up`"
            ) from None

    def _asked_to_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True


def _make_directory(root: Path) -> None:
    try:
        # Passable for the databases' account, readable for nobody else.
        root.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        raise StackError(
            f"the data directory {root} cannot be made: {error.strerror}; choose another one with "
            "--data-dir"
        ) from None


def _require_free_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            raise StackError(
                f"port {port} on {host} is in use; choose another one with --port"
            ) from None


def _run_module(module: str, environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise StackError(lines[-1] if lines else f"{module} failed")
    return done.stdout


def _service_programs(options: StackOptions, environment: dict[str, str]) -> list[Program]:
    def answers() -> bool:
        try:
            return httpx.get(f"{options.url}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def celery(queue: str, threads: int) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", "celery", "-A", "worker.celery_app", "worker", "-Q", queue),
            *("--pool", "threads", "-c", str(threads), "-n", f"{queue}@%h"),
            *("--loglevel", "WARNING"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        )

    threads = int(_run_module("worker.presence", environment))
    api = (
        *(sys.executable, "-m", "uvicorn", "--factory", "app.main:create_app"),
        *("--host", options.host, "--port", str(options.port), "--no-access-log"),
        *("--timeout-graceful-shutdown", "3"),
    )
    return [
        Program("api", api, environment, ready=answers),
        Program("scheduler", (sys.executable, "-m", "worker.scheduler"), environment),
        Program("training-worker", celery("training", threads), environment),
        Program("export-worker", celery("exports", 1), environment),
    ]
