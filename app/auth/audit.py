"""The audit trail: every change, in the transaction that makes it."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth.keys import Caller
from app.db.base import visible
from app.db.models import AuditRow
from app.db.paging import newest_first


def note(session: AsyncSession, caller: Caller, *, action: str, target: str) -> None:
    """Write one change down."""
    session.add(AuditRow(team=caller.team, key_id=caller.key_id, action=action, target=target))


async def page(
    session: AsyncSession, team: str | None, *, before: int | None, limit: int
) -> Sequence[AuditRow]:
    """Changes, newest first."""
    query = select(AuditRow).where(visible(AuditRow.team, team))
    return await newest_first(session, query, AuditRow.arrival, before=before, limit=limit)
