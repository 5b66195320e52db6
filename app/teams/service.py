"""Teams, and what they used."""

from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import visible
from app.db.models import AttemptRow, TeamRow
from app.exceptions import NotFound
from app.teams import quotas
from dressage.spec.status import AttemptKind
from dressage.spec.team import Team, TeamLimits, UsageBy, UsageRow


async def every(session: AsyncSession, team: str | None) -> list[Team]:
    """The teams that the caller may see, by name."""
    rows = await session.scalars(
        select(TeamRow).where(visible(TeamRow.name, team)).order_by(TeamRow.name)
    )
    return [await view(session, row) for row in rows.all()]


async def find(session: AsyncSession, team: str | None, name: str) -> TeamRow:
    """One team.

    Raises:
        NotFound: There is no such team, or it is not the caller's.
    """
    row = await session.get(TeamRow, name) if team in (None, name) else None
    if row is None:
        raise NotFound(f"there is no team {name!r}")
    return row


async def put(session: AsyncSession, name: str, limits: TeamLimits) -> tuple[TeamRow, bool]:
    """Make a team, or give one other limits. Returns it, and whether it is new."""
    row = await session.get(TeamRow, name, with_for_update=True)
    is_new = False
    if row is None:  # two requests at once may make it
        made = await session.scalar(
            insert(TeamRow).values(name=name).on_conflict_do_nothing().returning(TeamRow.name)
        )
        is_new = made is not None
        row = await session.get_one(TeamRow, name, with_for_update=True)
    for field, value in limits.model_dump().items():
        setattr(row, field, value)
    await session.flush()
    await session.refresh(row)
    return row, is_new


async def view(session: AsyncSession, row: TeamRow) -> Team:
    """A team with what it uses now."""
    running = await session.scalar(
        select(func.sum(AttemptRow.gpus)).where(
            AttemptRow.team == row.name, AttemptRow.ended_at.is_(None)
        )
    )
    return Team(
        **TeamLimits.model_validate(row).model_dump(),
        name=row.name,
        running_gpus=running or 0,
        queued_jobs=await quotas.queued_jobs(session, row.name),
        storage_bytes=await quotas.storage_bytes(session, row.name),
        created_at=row.created_at,
    )


async def usage(
    session: AsyncSession, team: str | None, *, since: datetime, until: datetime, by: UsageBy
) -> list[UsageRow]:
    """GPU time within a period; an attempt counts for the part of it that lies inside."""
    end = func.least(func.coalesce(AttemptRow.ended_at, func.clock_timestamp()), until)
    seconds = func.extract("epoch", end - func.greatest(AttemptRow.started_at, since))
    columns: dict[UsageBy, list[Any]] = {
        UsageBy.TEAM: [AttemptRow.team],
        UsageBy.JOB: [AttemptRow.team, AttemptRow.job_id],
        UsageBy.ATTEMPT: [
            AttemptRow.team,
            AttemptRow.job_id,
            AttemptRow.number.label("attempt"),
            AttemptRow.worker_id,
            AttemptRow.gpus,
            AttemptRow.outcome,
        ],
    }
    keys = columns[by]
    rows = await session.execute(
        select(
            *keys,
            func.count().label("attempts"),
            func.sum(AttemptRow.gpus * seconds).label("gpu_seconds"),
            func.sum(seconds).label("seconds"),
        )
        .where(
            visible(AttemptRow.team, team),
            AttemptRow.kind == AttemptKind.TRAIN,
            AttemptRow.started_at < until,
            (AttemptRow.ended_at > since) | AttemptRow.ended_at.is_(None),
        )
        .group_by(*keys)
        .order_by(*keys[:3])
    )
    return [UsageRow.model_validate(dict(row._mapping)) for row in rows]
