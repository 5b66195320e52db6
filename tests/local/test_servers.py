"""The embedded databases: started anew on what they kept, and sentences where they cannot."""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import psycopg
import pytest
import redis

from app.broker.celery import create_celery
from app.broker.wake import Queue, wake
from dressage.local.errors import LaunchError
from dressage.local.servers import EmbeddedDatabases


@pytest.fixture
def root():
    # As root the servers run as another user, who cannot pass through pytest's own folder.
    root = Path(tempfile.mkdtemp(prefix="dressage-servers-"))
    root.chmod(0o711)
    yield root
    shutil.rmtree(root)


def test_what_was_stored_is_there_after_a_stop_and_the_sockets_are_free_again(root):
    with (
        EmbeddedDatabases(root) as databases,
        psycopg.connect(databases.postgres.url) as connection,
    ):
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    with EmbeddedDatabases(root) as databases:
        with psycopg.connect(databases.postgres.url) as connection:
            assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
        assert (root / "run" / "valkey.sock").is_socket()


@pytest.mark.parametrize("folder", ["with space", "%41", "a&b", "a#b", "a?b", "ü"])
def test_a_data_directory_may_have_any_name(root, folder):
    place = root / folder
    place.mkdir(mode=0o711)
    with EmbeddedDatabases(place) as databases:
        _require_both(databases)
        celery = create_celery("redis+socket://" + databases.valkey.url.removeprefix("unix://"))
        wake(celery, Queue.EXPORTS)
        assert redis.Redis.from_url(databases.valkey.url).llen("exports") == 1


def test_databases_ask_for_a_password_that_others_cannot_read(root):
    with EmbeddedDatabases(root) as databases:
        without = re.sub(":[0-9a-f]{48}@", "@", databases.postgres.url)
        with pytest.raises(psycopg.OperationalError, match="no password"):
            psycopg.connect(without)
        nobody = redis.Redis.from_url(re.sub(":[0-9a-f]{48}@", "", databases.valkey.url))
        with pytest.raises(redis.AuthenticationError):
            nobody.flushall()
        _require_both(databases)
        shown = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True).stdout
        for secret in (root / "secrets").iterdir():
            assert secret.read_text() not in shown
            assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((root / "secrets").stat().st_mode) == 0o700


def test_a_cluster_from_before_there_was_a_password_gets_one(root):
    with EmbeddedDatabases(root) as databases:
        url = databases.postgres.url
    (root / "postgres" / "pg_hba.conf").write_text("local all all trust\n")
    with EmbeddedDatabases(root):
        with pytest.raises(psycopg.OperationalError, match="no password"):
            psycopg.connect(re.sub(":[0-9a-f]{48}@", "@", url))
        psycopg.connect(url).close()


@pytest.mark.parametrize("content", ["", "junk", "OURS\n/elsewhere\n"])
def test_a_lock_that_a_killed_server_left_is_removed(root, content):
    with EmbeddedDatabases(root) as databases:
        account = databases._account
    lock = root / "postgres" / "postmaster.pid"
    lock.write_text(content.replace("OURS", str(os.getpid())))
    account.give(lock)
    with EmbeddedDatabases(root) as databases:
        _require_both(databases)


def test_a_first_start_killed_half_way_is_made_anew(root):
    (root / "postgres.new").mkdir()
    (root / "postgres.new" / "PG_VERSION").write_text("18")
    with EmbeddedDatabases(root) as databases:
        _require_both(databases)


def test_what_a_broker_left_broken_is_forgotten(root):
    (root / "valkey" / "appendonlydir").mkdir(parents=True)
    (root / "valkey" / "appendonlydir" / "appendonly.aof.1.incr.aof").write_bytes(bytes(100))
    with EmbeddedDatabases(root) as databases:
        _require_both(databases)


def _require_both(databases):
    with psycopg.connect(databases.postgres.url) as connection:
        assert connection.execute("SELECT 42").fetchone() == (42,)
    assert redis.Redis.from_url(databases.valkey.url).ping()


def test_a_path_too_long_for_a_socket_is_a_sentence(root):
    deep = root / ("x" * 100)
    deep.mkdir()
    with pytest.raises(LaunchError, match="too long for a socket"):
        EmbeddedDatabases(deep)
