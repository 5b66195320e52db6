"""Which queues have work that nobody has claimed."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import ExportRow, JobRow
from app.queue.doorbell import Queue
from app.queue.exports import TRAINED
from dressage.spec.status import ExportStatus, JobStatus


async def queues_with_work(session: AsyncSession) -> set[Queue]:
    """The queues to ring for."""
    waiting = set()
    if await session.scalar(select(JobRow.id).where(JobRow.status == JobStatus.QUEUED).limit(1)):
        waiting.add(Queue.TRAINING)
    if await session.scalar(
        select(ExportRow.id)
        .join(JobRow, JobRow.id == ExportRow.job_id)
        .where(ExportRow.status == ExportStatus.QUEUED, JobRow.status.in_(TRAINED))
        .limit(1)
    ):
        waiting.add(Queue.EXPORTS)
    return waiting
