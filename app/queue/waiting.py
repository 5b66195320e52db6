"""Whether there are exports that nobody has claimed."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import ExportRow, JobRow
from app.queue.exports import is_due


async def exports_wait(session: AsyncSession) -> bool:
    """Whether to ring for exports."""
    found = await session.scalar(
        select(ExportRow.id).join(JobRow, JobRow.id == ExportRow.job_id).where(is_due()).limit(1)
    )
    return found is not None
