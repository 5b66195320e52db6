"""Whether there are exports that nobody has claimed."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import ExportRow, JobRow
from app.queue.exports import TRAINED
from dressage.spec.status import ExportStatus


async def exports_wait(session: AsyncSession) -> bool:
    """Whether to ring for exports."""
    found = await session.scalar(
        select(ExportRow.id)
        .join(JobRow, JobRow.id == ExportRow.job_id)
        .where(ExportRow.status == ExportStatus.QUEUED, JobRow.status.in_(TRAINED))
        .limit(1)
    )
    return found is not None
