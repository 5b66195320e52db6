"""The audit trail: every change, in the transaction that makes it."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth.keys import Caller
from app.db.models import AuditRow
from dressage.spec.team import AuditEntry


def note(session: AsyncSession, caller: Caller, *, action: str, target: str) -> None:
    """Write one change down."""
    session.add(AuditRow(team=caller.team, key_id=caller.key_id, action=action, target=target))


async def page(
    session: AsyncSession, team: str | None, *, before: int | None, limit: int
) -> Sequence[AuditRow]:
    """Changes, newest first."""
    query = select(AuditRow)
    if team is not None:
        query = query.where(AuditRow.team == team)
    if before is not None:
        query = query.where(AuditRow.arrival < before)
    return (await session.scalars(query.order_by(AuditRow.arrival.desc()).limit(limit))).all()


def view(row: AuditRow) -> AuditEntry:
    """A change as the service shows it."""
    return AuditEntry(
        time=row.time, team=row.team, key_id=row.key_id, action=row.action, target=row.target
    )
