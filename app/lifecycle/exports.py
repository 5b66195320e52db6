"""The one place where an export's status changes, with its event in the same transaction."""

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import ExportRow
from app.lifecycle.jobs import EventDraft, IllegalTransition, append_events
from dressage.spec.event import EventType
from dressage.spec.status import EXPORT_TERMINAL, ExportStatus, Reason

S = ExportStatus
EXPORT_TRANSITIONS: dict[ExportStatus, frozenset[ExportStatus]] = {
    S.QUEUED: frozenset({S.RUNNING, S.CANCELLED}),
    S.RUNNING: frozenset({S.QUEUED, S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    # Asked for again: after a failure, or with other options.
    S.SUCCEEDED: frozenset({S.QUEUED}),
    S.FAILED: frozenset({S.QUEUED}),
    S.CANCELLED: frozenset({S.QUEUED}),
}


async def switch_export(
    session: AsyncSession,
    export: ExportRow,
    to: ExportStatus,
    *,
    reason: Reason | None = None,
    message: str | None = None,
) -> None:
    """Move a locked export to another status.

    Raises:
        IllegalTransition: The transition table does not allow it.
    """
    if to not in EXPORT_TRANSITIONS[ExportStatus(export.status)]:
        raise IllegalTransition(f"{export.id}: {export.status} → {to}")
    export.status, export.reason, export.message = to, reason, message
    now = await session.scalar(select(func.clock_timestamp()))
    export.finished_at = now if to in EXPORT_TERMINAL else None
    await session.flush()
    data = {
        "export": export.name,
        "status": to,
        "reason": reason,
        "message": message,
        "attempt": export.attempts,
    }
    await append_events(session, export.job_id, [EventDraft(EventType.EXPORT, data)])
