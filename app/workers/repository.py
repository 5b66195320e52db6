"""Presence of workers."""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import WorkerRow

FORGOTTEN_AFTER = timedelta(days=1)


async def beat(
    session: AsyncSession, *, worker_id: str, hostname: str, pid: int, queue: str, gpus: int
) -> None:
    """Say that a worker is alive."""
    now = func.clock_timestamp()
    values = {"hostname": hostname, "pid": pid, "queue": queue, "gpus": gpus, "heartbeat_at": now}
    statement = insert(WorkerRow).values(id=worker_id, **values)
    await session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


async def leave(session: AsyncSession, worker_id: str) -> None:
    """Forget a worker that stops in good order."""
    await session.execute(delete(WorkerRow).where(WorkerRow.id == worker_id))


async def present(session: AsyncSession) -> Sequence[WorkerRow]:
    """Workers seen within a day, longest running first."""
    await session.execute(
        delete(WorkerRow).where(WorkerRow.heartbeat_at < func.clock_timestamp() - FORGOTTEN_AFTER)
    )
    return (await session.scalars(select(WorkerRow).order_by(WorkerRow.started_at))).all()
