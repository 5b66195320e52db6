"""Exports on request: made with a job, or later from what it has trained."""

from collections.abc import Sequence

from pydantic import TypeAdapter
from sqlalchemy.ext.asyncio import AsyncSession

from app.broker.wake import PendingWakes
from app.db.base import new_id
from app.db.models import ExportRow, JobRow
from app.exceptions import JobInvalid, NotFound
from app.exports import repository
from app.exports.checks import export_problems, require_trained
from app.lifecycle.exports import switch_export
from app.lifecycle.jobs import EventDraft, append_events, lock_job
from app.policy import AdmissionPolicy
from app.teams import quotas
from dressage.spec.event import EventType
from dressage.spec.export import ExportSpec
from dressage.spec.job import JobSpec
from dressage.spec.status import AttemptKind, ExportStatus


def add_exports(session: AsyncSession, job: JobRow, wanted: Sequence[ExportSpec]) -> None:
    """Queue the exports that a job was submitted with."""
    session.add_all(_new(job, export) for export in wanted)


async def request_export(
    session: AsyncSession,
    wakes: PendingWakes,
    policy: AdmissionPolicy,
    visible: JobRow,
    wanted: ExportSpec,
) -> tuple[ExportRow, bool]:
    """Queue an export of a trained job. Returns it, and whether it is (queued) anew.

    One that waits, runs or has succeeded is what was asked for; one that failed is tried again, and
    one that is wanted with other options is made again.

    Raises:
        NotFound: Somebody has deleted the job just now.
        JobNotTrained: It has no trained model (yet).
        QuotaExceeded: The team's files are too big already.
        JobInvalid: The export cannot be made.
    """
    job = await lock_job(session, visible.id)
    if job is None:
        raise NotFound(f"there is no job {visible.id!r}")
    spec = JobSpec.model_validate(job.spec)
    await require_trained(session, job, wanted.checkpoint)
    await quotas.require_storage(session, job.team)
    await quotas.require_task(session, job.team, limit=policy.max_waiting_tasks)
    asked = spec.model_copy(update={"exports": (wanted,)})
    problems = await export_problems(session, policy, asked, trained=True)
    if problems:
        raise JobInvalid.of(problems)
    row = await repository.export_named(session, job.id, wanted.export_name)
    if row is None:
        row = _new(job, wanted)
        session.add(row)
        data = {"export": row.name, "status": ExportStatus.QUEUED}
        await append_events(session, job.id, [EventDraft(EventType.EXPORT, data)])
    elif _asked_anew(row, wanted):
        row.spec, row.attempts, row.not_before = wanted.model_dump(mode="json"), 0, None
        await switch_export(session, row, ExportStatus.QUEUED)
    else:
        return row, False
    await session.flush()
    await session.refresh(row)
    wakes.exports()
    return row, True


def _new(job: JobRow, wanted: ExportSpec) -> ExportRow:
    return ExportRow(
        id=new_id("export"),
        kind=AttemptKind.EXPORT,
        job_id=job.id,
        name=wanted.export_name,
        spec=wanted.model_dump(mode="json"),
        status=ExportStatus.QUEUED,
    )


def _asked_anew(row: ExportRow, wanted: ExportSpec) -> bool:
    """Whether an export has to be made (again): it failed, or is wanted in another way."""
    if row.status in (ExportStatus.FAILED, ExportStatus.CANCELLED):
        return True
    done: ExportSpec = TypeAdapter(ExportSpec).validate_python(row.spec)
    return row.status == ExportStatus.SUCCEEDED and done != wanted
