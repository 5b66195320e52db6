import subprocess
import sys

import psycopg
import pytest

from app.admin import migrate
from tests.conftest import ROOT
from tests.servers import service_environment


@pytest.fixture
def alembic(servers, tmp_path, database_url):
    import os

    def go(*arguments, url=database_url):
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


def test_down_and_up_again(alembic, database_url):
    before = tables(database_url)
    assert "jobs" in before
    assert alembic("downgrade", "base").returncode == 0
    assert tables(database_url) == set()
    assert alembic("upgrade", "head").returncode == 0
    assert tables(database_url) == before


def test_the_models_and_the_migrations_agree(alembic):
    done = alembic("check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_database_that_does_not_answer_is_a_sentence(tmp_path):
    import os

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


def test_a_database_that_is_too_old_is_a_sentence(database_url, monkeypatch):
    monkeypatch.setattr(migrate, "OLDEST_POSTGRES", 99)
    with pytest.raises(SystemExit, match="PostgreSQL 18 is too old; 99 or newer is needed"):
        migrate.migrate(database_url)
