"""Leases on follow-up tasks, and what their end means for the job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import AttemptRow, ExportRow, JobRow
from app.exports import repository
from app.lifecycle.exports import switch_export
from app.lifecycle.jobs import end_cancelled, switch_status
from app.scheduling.leases import (
    Lease,
    StaleLease,
    close_lease,
    fenced,
    lock_silent,
    open_lease,
)
from app.scheduling.retries import RetryPolicy, from_now
from dressage.spec.status import (
    EXPORT_TERMINAL,
    TERMINAL,
    AttemptKind,
    AttemptOutcome,
    ExportStatus,
    JobStatus,
    Reason,
)

KINDS = (AttemptKind.EXPORT, AttemptKind.GENERATION)
# Questions to a trained agent also come when all else is done.
TRAINED = (JobStatus.EXPORTING, JobStatus.SUCCEEDED)
# What another try may help against, after a while.
TRANSIENT = (Reason.OLLAMA_UNAVAILABLE, Reason.STORAGE_UNAVAILABLE, Reason.DISK_FULL)


@dataclass(frozen=True)
class ExportClaim:
    """What a worker is to do.

    Attributes:
        lease: Its hold on the export.
        name: Of the export, within its job.
        spec: What was asked for.
        result: Of an earlier attempt, or of the same export as it was asked for before.
    """

    lease: Lease
    name: str
    spec: dict[str, Any]
    result: dict[str, Any] | None


async def claim_export(session: AsyncSession, worker_id: str) -> ExportClaim | None:
    """Take the oldest waiting export of a job whose training is over."""
    found = (
        await session.execute(
            select(ExportRow, JobRow)
            .join(JobRow, JobRow.id == ExportRow.job_id)
            .where(is_due())
            .order_by(ExportRow.arrival)
            .limit(1)
            # The job, too: whoever cancels it locks job and exports in this order.
            .with_for_update(skip_locked=True)
        )
    ).one_or_none()
    if found is None:
        return None
    export, job = found
    export.attempts += 1
    lease = await open_lease(
        session,
        job,
        kind=AttemptKind(export.kind),
        work_id=export.id,
        attempt=export.attempts,
        worker_id=worker_id,
    )
    await switch_export(session, export, ExportStatus.RUNNING)
    return ExportClaim(lease, export.name, export.spec, export.result)


def is_due() -> ColumnElement[bool]:
    """The condition that an export, joined with its job, can be taken now."""
    return and_(
        ExportRow.status == ExportStatus.QUEUED,
        # A kept checkpoint is there also when the training came to nothing.
        or_(
            JobRow.status.in_(TRAINED),
            and_(
                JobRow.status.in_(TERMINAL), ExportRow.spec["checkpoint"].as_integer().is_not(None)
            ),
        ),
        or_(ExportRow.not_before.is_(None), ExportRow.not_before <= func.clock_timestamp()),
    )


async def exports_wait(session: AsyncSession) -> bool:
    """Whether there is an export that nobody has claimed."""
    found = await session.scalar(
        select(ExportRow.id).join(JobRow, JobRow.id == ExportRow.job_id).where(is_due()).limit(1)
    )
    return found is not None


async def settle_export(
    session: AsyncSession,
    lease: Lease,
    status: ExportStatus,
    policy: RetryPolicy,
    *,
    reason: Reason,
    message: str | None = None,
    result: dict[str, Any] | None = None,
) -> None:
    """Store how an export ended; the last one of a job ends the job.

    One that failed for what may pass is queued again, each time for later.

    Raises:
        StaleLease: The export is somebody else's by now.
    """
    job, _, export = await fenced_export(session, lease)
    export.result = result
    await close_lease(session, export.id, AttemptOutcome(status))
    transient = status is ExportStatus.FAILED and reason in TRANSIENT
    if transient and export.attempts < policy.max_attempts and job.status != JobStatus.CANCELLING:
        delay = policy.delay(export.attempts + 1)
        export.not_before = await from_now(session, delay)
        status = ExportStatus.QUEUED
        message = f"{message}; tried again in {delay.total_seconds():g} s"
    await switch_export(session, export, status, reason=reason, message=message)
    await finish_job(session, job)


async def release_export(session: AsyncSession, lease: Lease) -> None:
    """Give an export back, for another worker.

    Raises:
        StaleLease: The export is somebody else's by now.
    """
    _, _, export = await fenced_export(session, lease)
    await close_lease(session, export.id, AttemptOutcome.RELEASED)
    await switch_export(session, export, ExportStatus.QUEUED)


async def fenced_export(
    session: AsyncSession, lease: Lease
) -> tuple[JobRow, AttemptRow, ExportRow]:
    """Job, attempt and export, locked, for a worker that still holds the lease.

    Raises:
        StaleLease: It does not; nothing may be written.
    """
    job, attempt = await fenced(session, lease)
    export = await session.get(ExportRow, lease.work_id, with_for_update=True)
    if export is None:
        raise StaleLease(lease.work_id)
    return job, attempt, export


async def cancel_exports(session: AsyncSession, job_id: str) -> int:
    """Cancel what waits. Returns how many are running: their workers end them."""
    exports = await repository.lock_all(session, job_id)
    for export in exports:
        if export.status == ExportStatus.QUEUED:
            await switch_export(
                session, export, ExportStatus.CANCELLED, reason=Reason.CANCELLED_BY_USER
            )
    return sum(export.status == ExportStatus.RUNNING for export in exports)


async def reap_exports(
    session: AsyncSession, silent: Mapping[str, int], policy: RetryPolicy
) -> list[str]:
    """End silent leases on exports: try again, or fail one after too many tries.

    Returns:
        The ids of the jobs concerned.
    """
    reaped = []
    async for job, attempt in lock_silent(session, silent, KINDS):
        export = await session.get_one(ExportRow, attempt.work_id, with_for_update=True)
        await close_lease(session, export.id, AttemptOutcome.LOST)
        await _after_loss(session, job, export, policy)
        await finish_job(session, job)
        reaped.append(job.id)
    return reaped


async def finish_job(session: AsyncSession, job: JobRow) -> None:
    """End the job when its last export has ended. A failed export is said, but fails nothing."""
    followers = await repository.lock_all(session, job.id)
    exports = [export for export in followers if export.kind == AttemptKind.EXPORT]
    if any(ExportStatus(export.status) not in EXPORT_TERMINAL for export in exports):
        return
    if job.status == JobStatus.CANCELLING:
        await end_cancelled(session, job)
    elif job.status == JobStatus.EXPORTING:
        failed = [export.name for export in exports if export.status == ExportStatus.FAILED]
        message = f"trained; these exports failed: {', '.join(failed)}" if failed else None
        await switch_status(
            session, job, JobStatus.SUCCEEDED, reason=Reason.COMPLETED, message=message
        )


async def _after_loss(
    session: AsyncSession, job: JobRow, export: ExportRow, policy: RetryPolicy
) -> None:
    if job.status == JobStatus.CANCELLING:
        await switch_export(
            session, export, ExportStatus.CANCELLED, reason=Reason.CANCELLED_BY_USER
        )
    elif export.attempts >= policy.max_attempts:
        await switch_export(
            session,
            export,
            ExportStatus.FAILED,
            reason=Reason.WORKER_LOST,
            message=f"its worker was lost {export.attempts} times",
        )
    else:
        await switch_export(session, export, ExportStatus.QUEUED, reason=Reason.WORKER_LOST)
