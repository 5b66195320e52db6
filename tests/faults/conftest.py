"""A whole service whose every process can be killed, stopped, and started again."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx2
import psycopg
import pytest
import redis

from dressage.client import Client
from dressage.local.servers import EmbeddedDatabases
from tests.conftest import ARITHMETIC, ROOT
from tests.end_to_end.conftest import free_port
from tests.servers import service_environment
from tests.waiting import wait_for

LEASE_SECONDS = 6.0
# The database's clock, which a test can move: `clock_timestamp()` of everything the service writes.
MOVABLE_CLOCK = (
    "CREATE SCHEMA moved",
    "CREATE TABLE moved.clock (ahead interval NOT NULL)",
    "INSERT INTO moved.clock VALUES ('0')",
    "CREATE FUNCTION moved.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
    "'SELECT pg_catalog.clock_timestamp() + ahead FROM moved.clock'",
    "ALTER DATABASE dressage SET search_path = moved, public, pg_catalog",
)


class Cluster:
    """PostgreSQL, Valkey, API, scheduler and workers, each a process of its own."""

    def __init__(self, root):
        self.root = root
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._databases = EmbeddedDatabases(root)
        self._postgres, self._valkey = self._databases.postgres, self._databases.valkey
        self.environment = {
            **os.environ,
            **service_environment(self._postgres.url, self._valkey.url, root),
            "DRESSAGE_LEASE_SECONDS": str(LEASE_SECONDS),
            "DRESSAGE_RETRY_BACK_OFF_SECONDS": "0",
            "DRESSAGE_STALL_SECONDS": "30",
            "PYTHONPATH": str(ROOT),
        }
        self.running = {}
        self.start_postgres()
        with psycopg.connect(self._postgres.url, autocommit=True) as connection:
            for statement in MOVABLE_CLOCK:
                connection.execute(statement)
        self.run("app.admin.migrate")
        self.key = self.run("app.admin.first_key").strip()
        self.start_valkey()
        for start in (self.start_api, self.start_scheduler, self.start_worker):
            start()

    def run(self, module):
        done = subprocess.run(
            [sys.executable, "-m", module],
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    def start_postgres(self):
        self.running["postgres"] = self._databases.start_postgres()._process

    def start_valkey(self):
        self.running["valkey"] = self._databases.start_valkey()._process

    def start_api(self):
        uvicorn = ("-m", "uvicorn", "--factory", "app.main:create_app", "--no-access-log")
        self._start("api", *uvicorn, "--port", str(self.port), "--timeout-graceful-shutdown", "2")

        def ready():
            with contextlib.suppress(httpx2.HTTPError):
                return httpx2.get(f"{self.url}/healthz", timeout=2).status_code == 200

        wait_for(ready)

    def start_scheduler(self):
        self._start("scheduler", "-m", "worker.scheduler")

    def start_worker(self, name="worker", gpus=0):
        self._start(
            name,
            *("-m", "celery", "-A", "tests.faults.celery_app", "worker", "-Q", "training,exports"),
            *("--pool", "threads", "-c", str(gpus + 2), "-n", f"{name}@%h"),
            *("--loglevel", "WARNING", "--without-gossip", "--without-mingle"),
            *("--without-heartbeat",),
            **{"DRESSAGE_GPUS": str(gpus)},
        )
        pid = self.running[name].pid
        wait_for(lambda: self.query("SELECT id FROM workers WHERE pid = %s", pid))

    def kill(self, name, number=signal.SIGKILL):
        """End a process and wait for its end; of PostgreSQL all of them."""
        process = self.running.pop(name)
        os.kill(process.pid, number)
        process.wait(30)

    def signal(self, name, number):
        os.kill(self.running[name].pid, number)

    def signal_postgres(self, number):
        """Postmaster and all its backends: nobody is answered any longer."""
        postmaster = self.running["postgres"].pid
        listed = subprocess.run(
            ["ps", "--ppid", str(postmaster), "-o", "pid="], capture_output=True, text=True
        )
        for pid in (postmaster, *map(int, listed.stdout.split())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def celery_url(self):
        return "redis+socket://" + self._valkey.url.removeprefix("unix://")

    def redis(self):
        return redis.Redis.from_url(self._valkey.url)

    def query(self, statement, *parameters):
        with psycopg.connect(self._postgres.url) as connection:
            found = connection.execute(statement, parameters)
            return found.fetchall() if found.description else None

    def let_postgres_write(self, *, allowed):
        """As after a failover to a standby: what is connected is cut off, the rest is read-only."""
        options = "-c default_transaction_read_only=off"
        with psycopg.connect(self._postgres.url, options=options, autocommit=True) as connection:
            value = "off" if allowed else "on"
            connection.execute(
                f"ALTER DATABASE dressage SET default_transaction_read_only = {value}"
            )
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = 'dressage' AND pid <> pg_backend_pid()"
            )

    def attempts(self, job_id):
        return self.query(
            "SELECT outcome, started_at, ended_at, worker_id FROM attempts WHERE work_id = %s "
            "ORDER BY number",
            job_id,
        )

    def processes_of(self, job_id):
        listed = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True)
        return [line for line in listed.stdout.splitlines() if f"{job_id}/" in line]

    def stop(self):
        for name in [*self.running][::-1]:
            process = self.running[name]
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            if name == "postgres":
                self.signal_postgres(signal.SIGCONT)
            process.send_signal(signal.SIGINT if name == "postgres" else signal.SIGKILL)
            process.wait(30)

    def _start(self, name, *arguments, **environment):
        with (self.root / "logs" / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *arguments],
                env={**self.environment, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@pytest.fixture(scope="module")
def cluster():
    root = Path(tempfile.mkdtemp(prefix="dressage-faults-"))
    root.chmod(0o711)
    cluster = Cluster(root)
    yield cluster
    cluster.stop()
    shutil.rmtree(root)


@pytest.fixture(autouse=True)
def whole(cluster):
    """Every test finds, and leaves, all processes alive and one worker."""
    yield
    for name, start in (
        ("postgres", cluster.start_postgres),
        ("valkey", cluster.start_valkey),
        ("api", cluster.start_api),
        ("scheduler", cluster.start_scheduler),
        ("worker", cluster.start_worker),
    ):
        process = cluster.running.get(name)
        if process is None or process.poll() is not None:
            start()
    for name in set(cluster.running) - {"postgres", "valkey", "api", "scheduler", "worker"}:
        cluster.kill(name)
        cluster.query("DELETE FROM workers WHERE pid NOT IN (%s)", cluster.running["worker"].pid)


@pytest.fixture
def client(cluster):
    with Client(cluster.url, key=cluster.key) as client:
        client.push_suite(ARITHMETIC, "arithmetic")
        yield client
