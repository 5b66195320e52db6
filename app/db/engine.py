"""Connections and sessions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from psycopg import errors
from sqlalchemy import NullPool, event, make_url
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

# A server that is away, restarts, or takes too long to answer (`asyncio.timeout`).
DATABASE_UNAVAILABLE = (OperationalError, InterfaceError, TimeoutError)

# What a server says that is not (yet) the one we need: a standby, one that is being restored, one
# that has dropped us. Its driver has other classes for these; for us the database is away.
_NOT_READY = (
    errors.ReadOnlySqlTransaction,
    errors.UndefinedTable,
    errors.IdleInTransactionSessionTimeout,
)

Sessions = async_sessionmaker[AsyncSession]

# A worker that is stopped in the middle of a transaction (its host sleeps) must not keep its locks:
# nobody could claim anything meanwhile. What a worker does between two statements takes no time.
IDLE_SECONDS = 5


def create_engine(url: str, *, pooled: bool = True) -> AsyncEngine:
    """An engine; without a pool for workers, where event loops come and go (Celery tasks)."""
    if not pooled:
        theirs = make_url(url).query.get("options", "")
        idle = f"-c idle_in_transaction_session_timeout={IDLE_SECONDS}s"
        return _engine(url, {"options": f"{idle} {theirs}".rstrip()}, poolclass=NullPool)
    return _engine(url, pool_pre_ping=True, pool_size=10, max_overflow=10)


def create_reading_engine(url: str) -> AsyncEngine:
    """An engine for single cheap reads: no transaction around each, no liveness check before."""
    return _engine(url, isolation_level="AUTOCOMMIT", pool_size=5)


def _engine(url: str, connect: dict[str, Any] | None = None, **options: Any) -> AsyncEngine:
    connect_args = {"connect_timeout": 5, **(connect or {})}
    # Statements are logged without what users sent.
    engine = create_async_engine(url, connect_args=connect_args, hide_parameters=True, **options)
    event.listen(engine.sync_engine, "handle_error", _not_ready)
    return engine


def _not_ready(context: ExceptionContext) -> Exception | None:
    if not isinstance(context.original_exception, _NOT_READY):
        return None
    context.is_disconnect = True  # the next connection may reach the right server
    error = OperationalError(context.statement, None, context.original_exception)
    error.hide_parameters = True
    return error


def create_sessions(engine: AsyncEngine) -> Sessions:
    """Sessions whose objects stay readable after commit."""
    return async_sessionmaker(engine, expire_on_commit=False)


@asynccontextmanager
async def unit_of_work(sessions: Sessions) -> AsyncIterator[AsyncSession]:
    """One transaction: committed at the end, rolled back on an exception."""
    async with sessions() as session, session.begin():
        yield session
