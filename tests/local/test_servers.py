"""The embedded databases: started anew on what they kept, and sentences where they cannot."""

import shutil
import tempfile
from pathlib import Path

import psycopg
import pytest

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


def test_a_path_too_long_for_a_socket_is_a_sentence(root):
    deep = root / ("x" * 100)
    deep.mkdir()
    with pytest.raises(LaunchError, match="too long for a socket"):
        EmbeddedDatabases(deep)
