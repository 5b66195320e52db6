"""Presence and state of workers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from sqlalchemy import case, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.broker.wake import Queue
from app.db.base import visible
from app.db.models import AttemptRow, WorkerRow
from dressage.spec.status import AttemptOutcome, WorkerState

WORKER_SILENT_AFTER = timedelta(seconds=15)
FORGOTTEN_AFTER, LOOKED_AT_AFTER = timedelta(minutes=5), timedelta(days=1)
SICK_AFTER = 2  # attempts in a row whose GPU could not be used


@dataclass(frozen=True)
class Presence:
    """What a worker says of itself."""

    hostname: str
    pid: int
    queue: str
    gpus: int
    gpu_type: str | None
    gpu_memory_gb: float | None
    labels: list[str]
    versions: dict[str, str]


async def beat(session: AsyncSession, worker_id: str, presence: Presence) -> None:
    """Say that a worker is alive. Its state stays as it is."""
    values = {**asdict(presence), "heartbeat_at": func.clock_timestamp()}
    statement = insert(WorkerRow).values(id=worker_id, **values)
    await session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


async def forget_silent(session: AsyncSession) -> None:
    """Forget workers that have been silent for long; later, if an operator has to look at them.

    Their silence alone decides: a process id means something in its own namespace only.
    """
    silence = func.clock_timestamp() - WorkerRow.heartbeat_at
    needed = case((WorkerRow.state == WorkerState.ACTIVE, FORGOTTEN_AFTER), else_=LOOKED_AT_AFTER)
    await session.execute(delete(WorkerRow).where(silence > needed))


async def leave(session: AsyncSession, worker_id: str) -> None:
    """Forget a worker that stops in good order."""
    await session.execute(delete(WorkerRow).where(WorkerRow.id == worker_id))


async def every(session: AsyncSession) -> Sequence[WorkerRow]:
    """All workers, oldest first."""
    return (await session.scalars(select(WorkerRow).order_by(WorkerRow.started_at))).all()


async def alive(session: AsyncSession, queue: Queue) -> Sequence[WorkerRow]:
    """Workers of a queue that have said so lately."""
    lately = func.clock_timestamp() - WORKER_SILENT_AFTER
    query = select(WorkerRow).where(WorkerRow.queue == queue, WorkerRow.heartbeat_at > lately)
    return (await session.scalars(query)).all()


async def get(session: AsyncSession, worker_id: str) -> WorkerRow | None:
    """One worker, locked."""
    found: WorkerRow | None = await session.scalar(
        select(WorkerRow).where(WorkerRow.id == worker_id).with_for_update()
    )
    return found


async def running(session: AsyncSession, team: str | None) -> Sequence[AttemptRow]:
    """Open attempts that a team (None: an operator) may see, oldest first."""
    query = (
        select(AttemptRow)
        .where(AttemptRow.ended_at.is_(None), visible(AttemptRow.team, team))
        .order_by(AttemptRow.started_at)
    )
    return (await session.scalars(query)).all()


async def note_gpu_failure(session: AsyncSession, worker_id: str, message: str) -> None:
    """Take a worker out of service when its GPU has failed twice in a row."""
    outcomes = await session.scalars(
        select(AttemptRow.outcome)
        .where(AttemptRow.worker_id == worker_id, AttemptRow.gpus > 0)
        .order_by(AttemptRow.started_at.desc())
        .limit(SICK_AFTER)
    )
    latest = outcomes.all()
    worker = await get(session, worker_id)
    if worker and len(latest) == SICK_AFTER and set(latest) == {AttemptOutcome.GPU_FAILED}:
        worker.state, worker.state_reason = WorkerState.SICK, message
