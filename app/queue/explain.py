"""Why a job waits, in a sentence."""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import JobRow, WorkerRow
from app.queue.doorbell import Queue
from dressage.spec.status import JobStatus

WORKER_SILENT_AFTER = timedelta(seconds=30)


async def waiting_for(session: AsyncSession, jobs: Sequence[JobRow]) -> dict[str, str]:
    """One sentence for each queued job."""
    queued = [job for job in jobs if job.status == JobStatus.QUEUED]
    if not queued:
        return {}
    most_gpus = await session.scalar(
        select(func.max(WorkerRow.gpus)).where(
            WorkerRow.queue == Queue.TRAINING,
            WorkerRow.heartbeat_at > func.clock_timestamp() - WORKER_SILENT_AFTER,
        )
    )
    return {job.id: await _sentence(session, job, most_gpus) for job in queued}


async def _sentence(session: AsyncSession, job: JobRow, most_gpus: int | None) -> str:
    if most_gpus is None:
        return "no training worker is alive"
    if most_gpus < job.gpus:
        return f"no live worker has {job.gpus} GPU; CPU workers take jobs with resources.gpus = 0"
    ahead = await session.scalar(
        select(func.count())
        .select_from(JobRow)
        .where(
            JobRow.status == JobStatus.QUEUED,
            or_(
                JobRow.priority < job.priority,
                (JobRow.priority == job.priority) & (JobRow.arrival < job.arrival),
            ),
        )
    )
    return f"behind {ahead} queued jobs" if ahead else "next, as soon as a worker is free"
