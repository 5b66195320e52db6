"""Connections and sessions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import NullPool
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

# A server that is away, restarts, or takes too long to answer (`asyncio.timeout`).
DATABASE_UNAVAILABLE = (OperationalError, InterfaceError, TimeoutError)

Sessions = async_sessionmaker[AsyncSession]


def create_engine(url: str, *, pooled: bool = True) -> AsyncEngine:
    """An engine; without a pool where event loops come and go (Celery tasks)."""
    patience = {"connect_timeout": 5}
    if not pooled:
        return create_async_engine(url, poolclass=NullPool, connect_args=patience)
    return create_async_engine(
        url, pool_pre_ping=True, pool_size=10, max_overflow=10, connect_args=patience
    )


def create_reading_engine(url: str) -> AsyncEngine:
    """An engine for single cheap reads: no transaction around each, no liveness check before."""
    return create_async_engine(
        url, isolation_level="AUTOCOMMIT", pool_size=5, connect_args={"connect_timeout": 5}
    )


def create_sessions(engine: AsyncEngine) -> Sessions:
    """Sessions whose objects stay readable after commit."""
    return async_sessionmaker(engine, expire_on_commit=False)


@asynccontextmanager
async def unit_of_work(sessions: Sessions) -> AsyncIterator[AsyncSession]:
    """One transaction: committed at the end, rolled back on an exception."""
    async with sessions() as session, session.begin():
        yield session
