import json
import os
import subprocess
import sys

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from app.admin import migrate
from tests.conftest import ROOT
from tests.servers import service_environment


@pytest.fixture
def alembic(servers, tmp_path, own_database_url):
    def go(*arguments, url=own_database_url):
        return subprocess.run(
            [sys.executable, "-m", "alembic", *arguments],
            env={**os.environ, **service_environment(url, "unix:///x", tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    return go


def tables(url):
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall()
    return {name for (name,) in rows} - {"alembic_version"}


def test_down_and_up_again(alembic, own_database_url):
    before = tables(own_database_url)
    assert "jobs" in before
    assert alembic("downgrade", "base").returncode == 0
    assert tables(own_database_url) == set()
    assert alembic("upgrade", "head").returncode == 0
    assert tables(own_database_url) == before


# What a column gets that must have a value and has no default.
SOMETHING = {
    "text": "x",
    "character varying": "x",
    "integer": 1,
    "bigint": 1,
    "double precision": 1.0,
    "boolean": False,
    "bytea": b"x",
    "json": Jsonb({}),
    "jsonb": Jsonb({}),
    "timestamp with time zone": "2026-01-01T00:00:00Z",
}


def insert(connection, table, **values):
    """A row with the given values, and something in all other columns that need a value."""
    required = connection.execute(
        "SELECT column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = 'public' AND table_name = %s AND is_nullable = 'NO' "
        "AND column_default IS NULL AND is_identity = 'NO'",
        (table,),
    ).fetchall()
    row = {name: SOMETHING[kind] for name, kind in required} | {
        name: Jsonb(value) if isinstance(value, dict) else value for name, value in values.items()
    }
    connection.execute(
        sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
            sql.Identifier(table),
            sql.SQL(", ").join(map(sql.Identifier, row)),
            sql.SQL(", ").join(map(sql.Placeholder, row)),
        ),
        row,
    )


def rows(connection, table):
    """Of a table, in an order that a migration does not change."""
    query = sql.SQL("SELECT to_jsonb(t) FROM {} t").format(sql.Identifier(table))
    return sorted((row for (row,) in connection.execute(query)), key=json.dumps)


def fill(connection):
    """A row at least in every table of the first release, in the order of their references."""
    insert(connection, "suites", id="suite_1", team="default")
    insert(connection, "suite_names", team="default", name="x", versions=1)
    insert(connection, "sweeps", id="sweep_1")
    waiting = {"reason": "a sentence", "obstacle": "team_quota", "position": 1}
    insert(connection, "jobs", id="job_waits", suite_id="suite_1", team="default", waiting=waiting)
    insert(
        connection, "jobs", id="job_done", suite_id="suite_1", team="default", sweep_id="sweep_1"
    )
    insert(
        *(connection, "attempts"),
        **{"id": "attempt_1", "job_id": "job_done", "number": 2, "lease_token": "of the job"},
    )
    of_job = {"job_id": "job_done", "attempts": 1, "heartbeats": 0, "relayed": 0}
    gguf, question = {"type": "gguf"}, {"type": "generation"}
    insert(connection, "exports", id="export_1", name="gguf", spec=gguf, status="queued", **of_job)
    of_job |= {"status": "running", "heartbeats": 7, "relayed": 300}
    insert(
        *(connection, "exports"),
        **{"id": "export_2", "name": "merged", "spec": {"type": "merged"}, "lease_token": "two"},
        **of_job,
    )
    insert(
        *(connection, "exports"),
        **{"id": "generation_3", "name": "generation-3", "spec": question, "lease_token": "three"},
        **of_job,
    )
    for table in ("artifacts", "events", "rollouts"):
        insert(connection, table, job_id="job_done")
    insert(connection, "webhooks", id="webhook_1")
    insert(connection, "deliveries", id="delivery_1", webhook_id="webhook_1")
    insert(connection, "keys", id="key_1", team="default")
    for table in ("audit", "workers", "loose_objects"):
        insert(connection, table)


def test_every_row_survives_an_upgrade_and_the_way_back(alembic, own_database_url):
    assert alembic("downgrade", "0002").returncode == 0
    with psycopg.connect(own_database_url) as connection:
        connection.execute("DELETE FROM keys")
        fill(connection)
        before = {table: rows(connection, table) for table in tables(own_database_url)}
    assert [table for table, content in before.items() if not content] == []

    done = alembic("upgrade", "head")
    assert done.returncode == 0, done.stderr
    with psycopg.connect(own_database_url) as connection:
        kinds = connection.execute("SELECT id, kind, name FROM exports ORDER BY id").fetchall()
        leases = connection.execute(
            "SELECT kind, work_id, job_id, number, lease_token, heartbeats, relayed, "
            "ended_at IS NULL FROM attempts ORDER BY lease_token"
        ).fetchall()
        waiting = connection.execute("SELECT waiting FROM jobs WHERE id = 'job_waits'").fetchone()
        after = {table: rows(connection, table) for table in tables(own_database_url)}
    assert kinds == [
        ("export_1", "export", "gguf"),
        ("export_2", "export", "merged"),
        ("generation_3", "generation", "generation_3"),
    ]
    assert leases == [
        ("train", "job_done", "job_done", 2, "of the job", 1, 1, True),
        ("generation", "generation_3", "job_done", 1, "three", 7, 300, True),
        ("export", "export_2", "job_done", 1, "two", 7, 300, True),
    ]
    assert waiting == ({"reason": "a sentence", "wait_reason": "team_quota", "position": 1},)
    untouched = set(before) - {"exports", "attempts", "jobs", "loose_objects"}
    for table in untouched:  # what is new in a row of before is empty
        pairs = zip(after[table], before[table], strict=True)
        assert [row | dict.fromkeys(set(row) - set(old)) for row, old in pairs] == after[table]
        known = [
            {name: row[name] for name in old}
            for row, old in zip(after[table], before[table], strict=True)
        ]
        assert known == before[table]
    assert after["orphan_blobs"] == before["loose_objects"]

    done = alembic("downgrade", "0002")
    assert done.returncode == 0, done.stderr
    with psycopg.connect(own_database_url) as connection:
        assert {table: rows(connection, table) for table in tables(own_database_url)} == before
    for direction in ("downgrade", "base"), ("upgrade", "head"):
        done = alembic(*direction)
        assert done.returncode == 0, done.stderr


def test_the_models_and_the_migrations_agree(alembic):
    done = alembic("check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_database_that_does_not_answer_is_a_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "app.admin.migrate"],
        env={
            **os.environ,
            **service_environment("postgresql://x@127.0.0.1:1/x", "unix:///x", tmp_path),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("the database does not answer: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_database_that_is_too_old_is_a_sentence(own_database_url, monkeypatch):
    monkeypatch.setattr(migrate, "OLDEST_POSTGRES", 99)
    with pytest.raises(SystemExit, match="PostgreSQL 18 is too old; 99 or newer is needed"):
        migrate.migrate(own_database_url)
