"""Starts all, keeps all, stops all in order: what `dressage up` does."""

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx2

from dressage.local.account import database_account, require_reachable
from dressage.local.errors import LaunchError
from dressage.local.process import SupervisedProcess
from dressage.local.programs import (
    CHECK_STORAGE,
    FIRST_KEY,
    MIGRATE,
    require_programs,
    run_module,
    service_programs,
)
from dressage.local.servers import EmbeddedDatabases

POLL_SECONDS = 0.2
LOCAL_OLLAMA, OLLAMA_URLS = "http://127.0.0.1:11434", "DRESSAGE_OLLAMA_URLS"
Say = Callable[[str], None]


@dataclass(frozen=True)
class LocalOptions:
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


class LocalService:
    """The processes of one data directory."""

    def __init__(self, options: LocalOptions, say: Say) -> None:
        self._options, self._say = options, say
        self._kept: list[SupervisedProcess] = []
        self._databases: EmbeddedDatabases | None = None
        self._lock_file: int | None = None
        self._stopping = False

    def _found_ollama(self) -> dict[str, str]:
        """The setting for an Ollama server of this machine, if there is one and none is named."""
        if OLLAMA_URLS in os.environ or OLLAMA_URLS in self._options.environment:
            return {}
        try:
            answer = httpx2.get(f"{LOCAL_OLLAMA}/api/version", timeout=0.5, trust_env=False)
            version = answer.json()["version"]
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            self._say(f"no Ollama at {LOCAL_OLLAMA}: exports to one need {OLLAMA_URLS}")
            return {}
        self._say(f"Ollama {version} at {LOCAL_OLLAMA}: jobs may register models there")
        return {OLLAMA_URLS: json.dumps([LOCAL_OLLAMA])}

    def start(self) -> None:
        """Bring everything up, in order.

        Raises:
            LaunchError: Something is in the way; what was started is stopped.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        options = self._options
        require_programs()
        root = options.data_dir.resolve()
        _make_directory(root)
        self._lock(root)
        _require_free_port(options.host, options.port)
        for name in ("logs", "artifacts", "runs"):
            (root / name).mkdir(exist_ok=True)
            (root / name).chmod(0o700)
        self._logs = root / "logs"
        database_url, redis_url = options.database_url, options.redis_url
        if not database_url or not redis_url:
            require_reachable(database_account(), root)
            self._databases = EmbeddedDatabases(root)
        if self._databases and not database_url:
            self._say("starting postgres")
            self._kept.append(self._databases.start_postgres())
            database_url = self._databases.postgres.url
        if self._databases and not redis_url:
            self._say("starting valkey")
            self._kept.append(self._databases.start_valkey())
            redis_url = self._databases.valkey.url
        assert database_url
        assert redis_url
        self._environment = {
            **self._found_ollama(),
            "DRESSAGE_DATABASE_URL": database_url,
            "DRESSAGE_REDIS_URL": redis_url,
            "DRESSAGE_STORAGE": options.storage or str(root / "artifacts"),
            "DRESSAGE_RUNS_DIR": str(root / "runs"),
            **options.environment,
        }
        run_module(CHECK_STORAGE, self._environment)
        self._say("migrating the database")
        run_module(MIGRATE, self._environment)
        self._first_key = run_module(FIRST_KEY, self._environment).strip() or None
        programs = service_programs(
            self._environment, host=options.host, port=options.port, ready=self._answers
        )
        for program in programs:
            self._say(f"starting {program.name}")
            self._kept.append(SupervisedProcess(program, self._logs))
            self._kept[-1].bring_up()

    def missing_key(self, known: str | None) -> str | None:
        """An operator key for a user whose own one is not of this service, else None.

        Whoever may start the service on its data directory may run it.
        """
        if self._first_key:
            return self._first_key
        headers = {"Authorization": f"Bearer {known}"}
        # Never through a proxy: the service is here.
        with httpx2.Client(trust_env=False, timeout=10) as loopback:
            answer = loopback.get(f"{self._options.url}/keys/mine", headers=headers)
        if known and answer.status_code == httpx2.codes.OK:
            return None
        return run_module(FIRST_KEY, self._environment, "--new").strip()

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
        if self._databases:
            self._databases.stop()  # one that did not come up is not among the kept
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _answers(self) -> bool:
        try:
            with httpx2.Client(trust_env=False, timeout=2) as loopback:
                return loopback.get(f"{self._options.url}/healthz").status_code == 200
        except httpx2.HTTPError:
            return False

    def _lock(self, root: Path) -> None:
        self._lock_file = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"the data directory {root} is in use by another `dressage up`"
            ) from None

    def _asked_to_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True


def _make_directory(root: Path) -> None:
    try:
        # Passable for the databases' account, readable for nobody else.
        root.mkdir(mode=0o711, parents=True, exist_ok=True)
        owner = root.stat().st_uid
        if os.geteuid() not in (0, owner):
            raise LaunchError(
                f"the data directory {root} belongs to user {owner}, and this is user "
                f"{os.geteuid()}; start as that user, or give it away with chown --recursive"
            )
    except OSError as error:
        raise LaunchError(
            f"the data directory {root} cannot be made: {error.strerror}; choose another one with "
            "--data-dir"
        ) from None


def _require_free_port(host: str, port: int) -> None:
    if not 0 < port < 65536:
        raise LaunchError(f"--port {port}: give one from 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                reason = f"port {port} on {host} is in use; choose another one with --port"
            else:
                why = getattr(error, "strerror", None) or error
                reason = f"--host {host}: this machine cannot listen there ({why})"
            raise LaunchError(reason) from None
