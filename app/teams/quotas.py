"""What a team may still do."""

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import ArtifactRow, ExportRow, JobRow, SuiteRow, TeamRow
from app.exceptions import QuotaExceeded
from dressage.spec.status import ExportStatus, JobStatus


async def require_room(session: AsyncSession, team: str, *, default: int) -> None:
    """One more job.

    Args:
        session: The transaction that stores it: until its end, others of the team wait.
        team: Whose.
        default: How many may wait, unless the team has a limit of its own.

    Raises:
        QuotaExceeded: Too many wait already, or the files are too big.
    """
    row = await _locked(session, team)
    limit = default if row is None or row.max_queued_jobs is None else row.max_queued_jobs
    queued = await queued_jobs(session, team)
    if queued >= limit:
        raise QuotaExceeded(
            f"{queued} jobs of team {team!r} wait, and {limit} may; cancel one, or ask an operator "
            "for more"
        )
    await _require_storage(session, row, 0)


async def require_task(session: AsyncSession, team: str, *, limit: int) -> None:
    """One more export or question.

    Raises:
        QuotaExceeded: Too many wait already.
    """
    await _locked(session, team)
    waiting = await session.scalar(
        select(func.count())
        .select_from(ExportRow)
        .join(JobRow, JobRow.id == ExportRow.job_id)
        .where(JobRow.team == team, ExportRow.status == ExportStatus.QUEUED)
    )
    if (waiting or 0) >= limit:
        raise QuotaExceeded(
            f"{waiting} exports and questions of team {team!r} wait, and {limit} may; wait for some"
        )


async def require_storage(session: AsyncSession, team: str, size: int = 0) -> None:
    """Room for one more file, of so many bytes if that is known.

    Raises:
        QuotaExceeded: The team's files are, or would be, too big.
    """
    await _require_storage(session, await _locked(session, team), size)


async def _locked(session: AsyncSession, team: str) -> TeamRow | None:
    """The team: two requests at once are counted one after the other."""
    return await session.get(TeamRow, team, with_for_update={"key_share": True})


async def _require_storage(session: AsyncSession, row: TeamRow | None, size: int) -> None:
    if row is None or row.max_storage_bytes is None:
        return
    used = await storage_bytes(session, row.name)
    if used + size > row.max_storage_bytes or used >= row.max_storage_bytes:
        more = f", and this one {size}" if size else ""
        raise QuotaExceeded(
            f"the files of team {row.name!r} have {used} bytes{more}, and {row.max_storage_bytes} "
            "is the limit; delete ended jobs, or ask an operator for more"
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
