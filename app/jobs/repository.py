"""Queries on jobs and what belongs to them."""

import json
import zlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import visible
from app.db.models import EventRow, JobRow, RolloutRow
from app.db.paging import newest_first
from dressage.spec.event import EventType, Rollout
from dressage.spec.status import JobStatus


async def by_idempotency_key(session: AsyncSession, team: str, key: str) -> JobRow | None:
    """The job that came with this key."""
    found: JobRow | None = await session.scalar(
        select(JobRow).where(JobRow.team == team, JobRow.idempotency_key == key)
    )
    return found


async def insert_if_new(session: AsyncSession, job: JobRow) -> bool:
    """Store a job, unless another one has its idempotency key."""
    values = {
        column.key: getattr(job, column.key)
        for column in JobRow.__table__.columns
        if getattr(job, column.key) is not None
    }
    stored = await session.scalar(
        insert(JobRow)
        .values(values)
        .on_conflict_do_nothing(index_elements=["team", "idempotency_key"])
        .returning(JobRow.id)
    )
    return stored is not None


async def page(
    session: AsyncSession,
    team: str | None,
    *,
    status: JobStatus | None,
    name: str | None,
    before: int | None,
    limit: int,
) -> Sequence[JobRow]:
    """Jobs of a team (None: of all), newest first."""
    query = select(JobRow).where(visible(JobRow.team, team))
    if status:
        query = query.where(JobRow.status == status)
    if name:
        query = query.where(JobRow.name == name)
    return await newest_first(session, query, JobRow.arrival, before=before, limit=limit)


async def events(
    session: AsyncSession,
    job_id: str,
    *,
    after: int,
    limit: int | None = None,
    type_: EventType | None = None,
) -> Sequence[EventRow]:
    """Events of a job after a sequence number, in order."""
    query: Select[Any] = select(EventRow).where(EventRow.job_id == job_id, EventRow.seq > after)
    if type_:
        query = query.where(EventRow.type == type_)
    query = query.order_by(EventRow.seq)
    return (await session.scalars(query.limit(limit) if limit else query)).all()


async def rollouts(
    session: AsyncSession, job_id: str, *, phase: str | None, after: int, limit: int
) -> Sequence[RolloutRow]:
    """Rollouts of a job, in order of arrival."""
    query = select(RolloutRow).where(RolloutRow.job_id == job_id, RolloutRow.arrival > after)
    if phase:
        query = query.where(RolloutRow.phase == phase)
    return (await session.scalars(query.order_by(RolloutRow.arrival).limit(limit))).all()


async def save_rollouts(
    session: AsyncSession, job_id: str, contents: Sequence[dict[str, Any]]
) -> None:
    """Store rollouts; a step that was repeated after a restart replaces its earlier ones."""
    newest = {content["id"]: content for content in contents}
    rows = [
        {
            "job_id": job_id,
            "id": content["id"],
            "phase": content["phase"],
            "step": content["step"],
            "content": zlib.compress(json.dumps(content, ensure_ascii=False).encode()),
        }
        for content in newest.values()
    ]
    if rows:
        statement = insert(RolloutRow).values(rows)
        await session.execute(
            statement.on_conflict_do_update(
                index_elements=["job_id", "id"], set_={"content": statement.excluded.content}
            )
        )


def rollout_of(row: RolloutRow) -> Rollout:
    """Unpack a stored rollout."""
    return Rollout.model_validate_json(zlib.decompress(row.content))
