"""What a team may still do."""

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import ArtifactRow, JobRow, SuiteRow, TeamRow
from app.exceptions import QuotaExceeded
from dressage.spec.status import JobStatus


async def require_room(session: AsyncSession, team: str) -> None:
    """One more job.

    Raises:
        QuotaExceeded: Too many wait already, or the files are too big.
    """
    # Locked, so that two requests at once are counted one after the other.
    row = await session.get(TeamRow, team, with_for_update={"key_share": True})
    if row and row.max_queued_jobs is not None:
        queued = await queued_jobs(session, team)
        if queued >= row.max_queued_jobs:
            raise QuotaExceeded(
                f"{queued} jobs of team {team!r} wait, and {row.max_queued_jobs} may; cancel one, "
                "or ask an operator for more"
            )
    await require_storage(session, team)


async def require_storage(session: AsyncSession, team: str) -> None:
    """Room for one more file.

    Raises:
        QuotaExceeded: The team's files are too big already.
    """
    row = await session.get(TeamRow, team)
    if row is None or row.max_storage_bytes is None:
        return
    used = await storage_bytes(session, team)
    if used >= row.max_storage_bytes:
        raise QuotaExceeded(
            f"the files of team {team!r} have {used} bytes, and {row.max_storage_bytes} is the "
            "limit; delete ended jobs, or ask an operator for more"
        )


async def queued_jobs(session: AsyncSession, team: str) -> int:
    """Jobs that wait for a worker."""
    count = await session.scalar(
        select(func.count())
        .select_from(JobRow)
        .where(JobRow.team == team, JobRow.status == JobStatus.QUEUED)
    )
    return count or 0


async def storage_bytes(session: AsyncSession, team: str) -> int:
    """Size of suites and artifacts; a file of two jobs counts for both."""
    artifacts = await session.scalar(
        select(func.sum(ArtifactRow.size))
        .join(JobRow, JobRow.id == ArtifactRow.job_id)
        .where(JobRow.team == team)
    )
    suites = await session.scalar(select(func.sum(SuiteRow.size)).where(SuiteRow.team == team))
    return int(artifacts or 0) + int(suites or 0)
