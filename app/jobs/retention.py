"""What is forgotten of ended jobs after a while: the bulk of their history.

Log lines, progress, rollouts and their summaries go; statuses, metrics, evaluations, warnings,
adjustments and files stay for as long as the job does.
"""

from datetime import timedelta

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import EventRow, JobRow, RolloutRow
from dressage.spec.event import EventType

BULK = (EventType.LOG, EventType.PROGRESS, EventType.ROLLOUT)
JOBS_AT_ONCE = 20


async def forget_bulk(session: AsyncSession, age: timedelta) -> int:
    """Trim some jobs that ended longer ago. Returns how many."""
    ended = await session.scalars(
        select(JobRow.id)
        .where(JobRow.finished_at < func.clock_timestamp() - age, JobRow.trimmed.is_(False))
        .order_by(JobRow.finished_at)
        .limit(JOBS_AT_ONCE)
        .with_for_update(skip_locked=True)
    )
    jobs = ended.all()
    if jobs:
        bulk = (EventRow.job_id.in_(jobs), EventRow.type.in_(BULK))
        await session.execute(delete(EventRow).where(*bulk))
        await session.execute(delete(RolloutRow).where(RolloutRow.job_id.in_(jobs)))
        await session.execute(update(JobRow).where(JobRow.id.in_(jobs)).values(trimmed=True))
    return len(jobs)
