"""What is forgotten of ended jobs after a while: the bulk of their history, and their files.

Log lines, progress, rollouts and their summaries go; statuses, metrics, evaluations, warnings and
adjustments stay for as long as the job does; files for as long as its team keeps them.
"""

from datetime import timedelta

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import blobs
from app.db.models import ArtifactRow, EventRow, JobRow, RolloutRow, TeamRow
from app.lifecycle.jobs import EventDraft, append_events
from dressage.spec.event import EventType
from dressage.spec.status import Reason

BULK = (EventType.LOG, EventType.PROGRESS, EventType.ROLLOUT, EventType.ALIVE)
JOBS_AT_ONCE = 20
SECONDS_OF_A_DAY = 86_400


async def forget_files(session: AsyncSession) -> int:
    """Let go the files of some jobs that ended longer ago than their team keeps them."""
    age = func.clock_timestamp() - JobRow.finished_at
    ended = await session.execute(
        select(JobRow.id, TeamRow.keep_files_days)
        .join(TeamRow, TeamRow.name == JobRow.team)
        .where(
            func.extract("epoch", age) > TeamRow.keep_files_days * SECONDS_OF_A_DAY,
            exists().where(ArtifactRow.job_id == JobRow.id),
        )
        .limit(JOBS_AT_ONCE)
        .with_for_update(skip_locked=True, of=JobRow)
    )
    jobs = ended.all()
    for job_id, days in jobs:
        gone = await session.scalars(
            delete(ArtifactRow).where(ArtifactRow.job_id == job_id).returning(ArtifactRow.sha256)
        )
        await blobs.mark_unreferenced(session, set(gone.all()))
        message = f"its team keeps files {days:g} days: they are gone"
        data = {"code": Reason.FILES_REMOVED, "message": message}
        await append_events(session, job_id, [EventDraft(EventType.WARNING, data)])
    return len(jobs)


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
