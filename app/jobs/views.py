"""From rows to what the service shows."""

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts.repository import artifact_view
from app.db.models import EventRow, ExportRow, JobRow
from app.jobs import repository
from app.queue import explain
from dressage.spec.event import Event
from dressage.spec.job import ExportView, Job


async def show(session: AsyncSession, rows: Sequence[JobRow]) -> tuple[Job, ...]:
    """Jobs with their exports, artifacts and, while queued, what they wait for."""
    ids = [row.id for row in rows]
    exports = await repository.exports_of(session, ids)
    artifacts = await repository.artifacts_of(session, ids)
    waiting = await explain.waiting_for(session, rows)
    return tuple(
        Job.model_validate(
            {
                "id": row.id,
                "team": row.team,
                "name": row.name,
                "status": row.status,
                "reason": row.reason,
                "message": row.message,
                "waiting": waiting.get(row.id),
                "spec": row.spec,
                "sweep_id": row.sweep_id,
                "adjustments": row.adjustments,
                "progress": row.progress,
                "result": row.result,
                "exports": [export_view(e) for e in exports if e.job_id == row.id],
                "artifacts": [artifact_view(a) for a in artifacts if a.job_id == row.id],
                "attempts": row.attempts,
                "created_at": row.created_at,
                "started_at": row.started_at,
                "finished_at": row.finished_at,
            }
        )
        for row in rows
    )


def export_view(row: ExportRow) -> ExportView:
    """One follow-up task."""
    return ExportView.model_validate(
        {
            "id": row.id,
            "name": row.name,
            "spec": row.spec,
            "status": row.status,
            "reason": row.reason,
            "message": row.message,
            "attempts": row.attempts,
            "result": row.result,
            "created_at": row.created_at,
            "finished_at": row.finished_at,
        }
    )


def event_view(row: EventRow) -> Event:
    """One line of history."""
    return Event(seq=row.seq, type=row.type, time=row.time, data=row.data)
