"""Whether the service works: what `/readyz` says, and what the scheduler tells it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import structlog
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.background import Background
from app.broker.wake import broker_problem
from app.db.engine import DATABASE_UNAVAILABLE, unit_of_work
from app.db.models import HeartbeatRow
from app.dependencies import Services
from app.storage import StorageUnavailable

log = structlog.get_logger()

SCHEDULER, READINESS = "scheduler", "readiness"
SILENT_AFTER = timedelta(seconds=30)
ANSWER_SECONDS, KEPT_SECONDS = 5.0, 1.0
OK = "ok"


async def beat(session: AsyncSession, name: str, problems: dict[str, str]) -> None:
    """Say that a part is there, and what does not work in it."""
    values = {"seen_at": func.clock_timestamp(), "problems": problems}
    statement = insert(HeartbeatRow).values(name=name, **values)
    await session.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))


class Health:
    """Asks each part that jobs need, once a second at most: anybody may want to know."""

    def __init__(self, parts: Services, background: Background) -> None:
        self._parts, self._background = parts, background
        self._lock = asyncio.Lock()
        self._found: dict[str, str] = {}
        self._until = 0.0

    async def checks(self) -> dict[str, str]:
        """By part: `ok`, or what is wrong with it."""
        async with self._lock:
            if time.monotonic() >= self._until:
                self._found = await self._ask()
                self._until = time.monotonic() + KEPT_SECONDS
        return self._found

    async def _ask(self) -> dict[str, str]:
        parts = self._parts
        asked: dict[str, Callable[[], Awaitable[str]]] = {
            "database": lambda: _database(parts),
            "storage": lambda: _storage(parts),
            "broker": lambda: _broker(parts),
            "scheduler": lambda: _scheduler(parts),
        }
        found = await asyncio.gather(*(_in_time(ask) for ask in asked.values()))
        return dict(zip(asked, found, strict=True)) | self._background.problems()


async def _in_time(ask: Callable[[], Awaitable[str]]) -> str:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await ask()
    except TimeoutError:
        return f"no answer within {ANSWER_SECONDS:g} seconds"


async def _database(parts: Services) -> str:
    """A write: a server that can only be read serves nobody."""
    try:
        async with unit_of_work(parts.sessions) as session:
            await beat(session, READINESS, {})
    except DATABASE_UNAVAILABLE as error:
        log.warning("readyz.database", error=str(error).splitlines()[:1])
        return "does not take a write"
    return OK


async def _storage(parts: Services) -> str:
    try:
        await asyncio.to_thread(parts.storage.check)
    except (StorageUnavailable, OSError) as error:
        log.warning("readyz.storage", error=str(error)[:300])
        return "does not answer"
    return OK


async def _broker(parts: Services) -> str:
    problem = await asyncio.to_thread(broker_problem, parts.celery)
    if problem:
        log.warning("readyz.broker", error=problem[:300])
        return "does not take a message"
    return OK


async def _scheduler(parts: Services) -> str:
    try:
        async with unit_of_work(parts.sessions) as session:
            age = func.clock_timestamp() - HeartbeatRow.seen_at
            row = (
                await session.execute(
                    select(age, HeartbeatRow.problems).where(HeartbeatRow.name == SCHEDULER)
                )
            ).one_or_none()
    except DATABASE_UNAVAILABLE:
        return "not known: the database is away"
    if row is None:
        return "none has been seen: start python -m worker.scheduler"
    if row[0] > SILENT_AFTER:
        return f"silent for {row[0].total_seconds():.0f} s"
    return "; ".join(f"{name}: {text}" for name, text in row[1].items()) or OK
