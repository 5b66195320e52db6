"""Real servers: PostgreSQL and Valkey on unix sockets, one database per test; and the API on them.

Everything heavy is imported where it is used: tests that need no server do not load one.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

# Of team `default`, in every test's database.
KEYS = {role: f"drs_{role}_of_the_tests" for role in ("operator", "submitter", "viewer")}


@pytest.fixture(scope="session")
def servers():
    """PostgreSQL, with a migrated template database, and Valkey."""
    from dressage.local.servers import EmbeddedDatabases

    # Not below pytest's own folder: as root the servers run as another user, who cannot get there.
    root = Path(tempfile.mkdtemp(prefix="dressage-tests-"))
    root.chmod(0o711)
    with EmbeddedDatabases(root) as databases:
        _prepare(databases, root)
        yield databases
    shutil.rmtree(root)


def _prepare(databases, root):
    import psycopg

    urls = databases.postgres.url, databases.valkey.url
    environment = {**os.environ, **service_environment(*urls, root)}
    subprocess.run([sys.executable, "-m", "app.admin.migrate"], env=environment, check=True)
    with psycopg.connect(databases.postgres.url, autocommit=True) as connection:
        # These databases need not outlive the machine.
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
        _store_keys(connection)


def _store_keys(connection):
    for role, key in KEYS.items():
        connection.execute(
            "INSERT INTO keys (id, team, name, role, prefix, sha256) "
            "VALUES (%s, 'default', '', %s, %s, %s)",
            (f"key_{role}", role, key[:12], hashlib.sha256(key.encode()).hexdigest()),
        )


def service_environment(database_url, redis_url, folder):
    return {
        "DRESSAGE_DATABASE_URL": database_url,
        "DRESSAGE_REDIS_URL": redis_url,
        "DRESSAGE_STORAGE": str(folder / "artifacts"),
        "DRESSAGE_RUNS_DIR": str(folder / "runs"),
    }


@pytest.fixture(scope="session")
def _database(servers):
    yield from _new_database(servers)


@pytest.fixture
def database_url(_database):
    """A database as the migrations leave it, with the tests' keys."""
    import psycopg

    yield _database
    with psycopg.connect(_database) as connection:
        # Emptied, because making a new one takes longer than most tests. A connection that a test
        # has left behind could hold a lock.
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        tables = connection.execute(
            "SELECT tablename FROM pg_tables "
            "WHERE schemaname = 'public' AND tablename <> 'alembic_version'"
        ).fetchall()
        used = [
            table
            for (table,) in tables
            if connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()
        ]
        connection.execute(f"TRUNCATE {', '.join(used)} RESTART IDENTITY CASCADE")
        connection.execute("INSERT INTO teams (name) VALUES ('default')")
        _store_keys(connection)


@pytest.fixture
def own_database_url(servers):
    """A database of the test's own, whose tables it may change."""
    yield from _new_database(servers)


def _new_database(servers):
    import psycopg

    url = servers.postgres.url
    name = f"test_{uuid.uuid4().hex}"
    admin = url.replace("/dressage?", "/postgres?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE dressage")
    yield url.replace("/dressage?", f"/{name}?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def settings(database_url, servers, tmp_path):
    from app.settings import Settings

    return Settings(
        database_url=database_url,
        redis_url=servers.valkey.url,
        storage=str(tmp_path / "artifacts"),
        runs_dir=tmp_path / "runs",
        max_upload_bytes=2_000_000,
        requests_per_minute=0,
    )


@pytest.fixture
def api(settings):
    """The service, asked by an operator."""
    from fastapi.testclient import TestClient

    from app.main import create_app

    app = create_app(settings)
    with TestClient(app, raise_server_exceptions=False, headers=bearer("operator")) as client:
        yield client


def bearer(role):
    return {"Authorization": f"Bearer {KEYS[role]}"}


@pytest.fixture(scope="session")
def _uploaded(tmp_path_factory):
    """What the first upload of the arithmetic suite has left: its answer, rows and files."""
    return {"files": tmp_path_factory.mktemp("uploaded") / "files"}


@pytest.fixture
def suite(api, arithmetic, settings, database_url, _uploaded):
    """The arithmetic suite, uploaded. Once: to import its code takes longer than most tests."""
    import psycopg
    from psycopg.types.json import Jsonb

    tables = ("suites", "suite_names", "audit")
    with psycopg.connect(database_url) as connection:
        if "answer" in _uploaded:
            shutil.copytree(_uploaded["files"], settings.storage, dirs_exist_ok=True)
            for table in tables:
                row = _uploaded[table]
                names = ", ".join(row)
                connection.execute(
                    f"INSERT INTO {table} ({names}) SELECT {names} "
                    f"FROM jsonb_populate_record(NULL::{table}, %s)",
                    (Jsonb(row),),
                )
            return _uploaded["answer"]
        params = {"name": "arithmetic"}
        response = api.post("/suites", params=params, content=arithmetic.to_archive())
        assert response.status_code == 201, response.text
        shutil.copytree(settings.storage, _uploaded["files"])
        for table in tables:
            (row,) = connection.execute(f"SELECT to_jsonb(t) - 'arrival' FROM {table} t").fetchone()
            _uploaded[table] = row
        _uploaded["answer"] = response.json()
    return _uploaded["answer"]
