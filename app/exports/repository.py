"""Queries on exports."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import ExportRow
from dressage.spec.status import AttemptKind


async def exports_of(session: AsyncSession, job_ids: Sequence[str]) -> Sequence[ExportRow]:
    """All exports of some jobs, in order of arrival."""
    query = (
        select(ExportRow)
        .where(ExportRow.job_id.in_(job_ids), ExportRow.kind == AttemptKind.EXPORT)
        .order_by(ExportRow.arrival)
    )
    return (await session.scalars(query)).all()


async def get(session: AsyncSession, job_id: str, export_id: str) -> ExportRow | None:
    """One export of a job."""
    found: ExportRow | None = await session.scalar(
        select(ExportRow).where(
            ExportRow.id == export_id,
            ExportRow.job_id == job_id,
            ExportRow.kind == AttemptKind.EXPORT,
        )
    )
    return found


async def export_named(session: AsyncSession, job_id: str, name: str) -> ExportRow | None:
    """A job's export by its name, locked."""
    found: ExportRow | None = await session.scalar(
        select(ExportRow)
        .where(ExportRow.job_id == job_id, ExportRow.name == name)
        .with_for_update()
    )
    return found


async def lock_all(session: AsyncSession, job_id: str) -> Sequence[ExportRow]:
    """Every follow-up task of a locked job, generations included, locked."""
    query = select(ExportRow).where(ExportRow.job_id == job_id).order_by(ExportRow.arrival)
    rows = await session.scalars(query.with_for_update().execution_options(populate_existing=True))
    return rows.all()
