"""From rows to jobs as the service shows them."""

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import repository as artifacts
from app.db.models import JobRow
from app.exports import repository as exports
from app.scheduling import explain
from dressage.spec.artifact import Artifact
from dressage.spec.job import ExportView, Job


async def serialize_jobs(session: AsyncSession, rows: Sequence[JobRow]) -> tuple[Job, ...]:
    """Jobs with their exports, artifacts and, while queued, what they wait for."""
    ids = [row.id for row in rows]
    exported = await exports.exports_of(session, ids)
    files = await artifacts.artifacts_of(session, ids)
    waiting = await explain.waiting_for(session, rows)
    return tuple(
        Job.model_validate(row).model_copy(
            update={
                "waiting": waiting.get(row.id),
                "exports": tuple(
                    ExportView.model_validate(e) for e in exported if e.job_id == row.id
                ),
                "artifacts": tuple(Artifact.model_validate(f) for f in files if f.job_id == row.id),
            }
        )
        for row in rows
    )
