"""Applies migrations to the database of `DRESSAGE_DATABASE_URL`, or to a given connection."""

from alembic import context
from sqlalchemy import create_engine, pool

import app.db.models  # noqa: F401  registers the tables
from app.db.base import Base
from app.settings import read_settings


def run(connection):
    context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True)
    with context.begin_transaction():
        # Two services that start at once migrate one after the other.
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(0x6d696772)")
        context.run_migrations()


engine = create_engine(read_settings().sqlalchemy_url, poolclass=pool.NullPool)
with engine.connect() as connection:
    run(connection)
