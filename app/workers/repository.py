"""Presence of workers."""

from sqlalchemy import delete, func
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import WorkerRow


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
