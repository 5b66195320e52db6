"""`python -m app.admin.migrate`: bring the database to the newest schema, or say why not."""

from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config

import migrations
from app.settings import read_settings

OLDEST_POSTGRES = 14


def migrate(url: str) -> None:
    """Check the server and apply migrations.

    Raises:
        SystemExit: The server does not answer, or is too old; with a sentence.
    """
    try:
        with psycopg.connect(url, connect_timeout=10) as connection:
            version = connection.info.server_version // 10000
    except psycopg.OperationalError as error:
        raise SystemExit(f"the database does not answer: {str(error).splitlines()[0]}") from None
    if version < OLDEST_POSTGRES:
        raise SystemExit(f"PostgreSQL {version} is too old; {OLDEST_POSTGRES} or newer is needed")
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__path__[0])))
    command.upgrade(config, "head")


if __name__ == "__main__":
    migrate(read_settings().libpq_url)
