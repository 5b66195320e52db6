"""Leases on follow-up tasks, and what their end means for the job."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import ExportRow, JobRow
from app.jobs.lifecycle import EventDraft, append_events, end_cancelled, lock_job, switch_status
from app.queue.claim import StaleLease
from app.queue.retries import RetryPolicy, from_now
from dressage.spec.event import EventType
from dressage.spec.generation import GENERATION_PREFIX
from dressage.spec.status import EXPORT_TERMINAL, TERMINAL, ExportStatus, JobStatus, Reason

# Questions to a trained agent also come when all else is done.
TRAINED = (JobStatus.EXPORTING, JobStatus.SUCCEEDED)
# What another try may help against, after a while.
PASSING = (Reason.OLLAMA_UNAVAILABLE, Reason.STORAGE_UNAVAILABLE, Reason.DISK_FULL)


@dataclass(frozen=True)
class ExportLease:
    """A worker's claim on one attempt of an export.

    Attributes:
        result: Of an earlier attempt, or of the same export as it was asked for before.
    """

    export_id: str
    job_id: str
    name: str
    spec: dict[str, Any]
    attempt: int
    token: str
    result: dict[str, Any] | None


async def claim_export(session: AsyncSession) -> ExportLease | None:
    """Take the oldest waiting export of a job whose training is over."""
    export = await session.scalar(
        select(ExportRow)
        .join(JobRow, JobRow.id == ExportRow.job_id)
        .where(is_due())
        .order_by(ExportRow.arrival)
        .limit(1)
        .with_for_update(skip_locked=True, of=ExportRow)
    )
    if export is None:
        return None
    export.attempts += 1
    export.lease_token = secrets.token_hex(16)
    export.heartbeats = export.relayed = 0
    await _switch(session, export, ExportStatus.RUNNING)
    return ExportLease(
        export.id,
        export.job_id,
        export.name,
        export.spec,
        export.attempts,
        export.lease_token,
        export.result,
    )


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


async def heartbeat_export(session: AsyncSession, lease: ExportLease) -> JobStatus:
    """Say that the worker is alive, and hear what has become of the job.

    Raises:
        StaleLease: The lease has ended.
    """
    job_id = await session.scalar(
        update(ExportRow)
        .where(ExportRow.lease_token == lease.token, ExportRow.status == ExportStatus.RUNNING)
        .values(heartbeats=ExportRow.heartbeats + 1)
        .returning(ExportRow.job_id)
    )
    if job_id is None:
        raise StaleLease(lease.export_id)
    job = await session.get_one(JobRow, job_id, populate_existing=True)
    return JobStatus(job.status)


async def settle_export(
    session: AsyncSession,
    lease: ExportLease,
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
    job, export = await fenced_export(session, lease)
    export.result = result
    passing = status is ExportStatus.FAILED and reason in PASSING
    if passing and export.attempts < policy.max_attempts and job.status != JobStatus.CANCELLING:
        delay = policy.delay(export.attempts + 1)
        export.not_before = await from_now(session, delay)
        status = ExportStatus.QUEUED
        message = f"{message}; tried again in {delay.total_seconds():g} s"
    await _switch(session, export, status, reason=reason, message=message)
    await finish_job(session, job)


async def release_export(session: AsyncSession, lease: ExportLease) -> None:
    """Give an export back, for another worker.

    Raises:
        StaleLease: The export is somebody else's by now.
    """
    _, export = await fenced_export(session, lease)
    await _switch(session, export, ExportStatus.QUEUED)


async def fenced_export(session: AsyncSession, lease: ExportLease) -> tuple[JobRow, ExportRow]:
    """Job and export, locked, for a worker that still owns the export.

    Raises:
        StaleLease: It does not; nothing may be written.
    """
    job = await lock_job(session, lease.job_id)
    export = await session.scalar(
        select(ExportRow)
        .where(ExportRow.lease_token == lease.token, ExportRow.status == ExportStatus.RUNNING)
        .with_for_update()
    )
    if job is None or export is None:
        raise StaleLease(lease.export_id)
    return job, export


async def cancel_exports(session: AsyncSession, job_id: str) -> int:
    """Cancel what waits. Returns how many are running: their workers end them."""
    exports = await _of(session, job_id)
    for export in exports:
        if export.status == ExportStatus.QUEUED:
            await _switch(session, export, ExportStatus.CANCELLED, reason=Reason.CANCELLED_BY_USER)
    return sum(export.status == ExportStatus.RUNNING for export in exports)


async def open_export_leases(session: AsyncSession) -> dict[str, int]:
    """Heartbeats of every running export, by lease token."""
    rows = await session.execute(
        select(ExportRow.lease_token, ExportRow.heartbeats).where(
            ExportRow.status == ExportStatus.RUNNING
        )
    )
    return {row.lease_token: row.heartbeats for row in rows if row.lease_token}


async def reap_exports(
    session: AsyncSession, silent: dict[str, int], policy: RetryPolicy
) -> list[str]:
    """End leases that have stood still: try again, or fail an export after too many tries."""
    jobs = await session.scalars(
        select(ExportRow.job_id).where(ExportRow.lease_token.in_(silent)).distinct()
    )
    reaped = sorted(jobs)
    for job_id in reaped:
        job = await lock_job(session, job_id)
        for export in await _of(session, job_id):
            if export.status == ExportStatus.RUNNING and (
                silent.get(export.lease_token or "") == export.heartbeats
            ):
                await _after_loss(session, job, export, policy)
        if job is not None:
            await finish_job(session, job)
    return reaped


async def finish_job(session: AsyncSession, job: JobRow) -> None:
    """End the job when its last export has ended. A failed export is said, but fails nothing."""
    exports = [e for e in await _of(session, job.id) if not e.name.startswith(GENERATION_PREFIX)]
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
    session: AsyncSession, job: JobRow | None, export: ExportRow, policy: RetryPolicy
) -> None:
    if job is not None and job.status == JobStatus.CANCELLING:
        await _switch(session, export, ExportStatus.CANCELLED, reason=Reason.CANCELLED_BY_USER)
    elif export.attempts >= policy.max_attempts:
        await _switch(
            session,
            export,
            ExportStatus.FAILED,
            reason=Reason.WORKER_LOST,
            message=f"its worker was lost {export.attempts} times",
        )
    else:
        await _switch(session, export, ExportStatus.QUEUED, reason=Reason.WORKER_LOST)


async def _of(session: AsyncSession, job_id: str) -> Sequence[ExportRow]:
    query = select(ExportRow).where(ExportRow.job_id == job_id).order_by(ExportRow.arrival)
    rows = await session.scalars(query.with_for_update().execution_options(populate_existing=True))
    return rows.all()


async def _switch(
    session: AsyncSession,
    export: ExportRow,
    to: ExportStatus,
    *,
    reason: Reason | None = None,
    message: str | None = None,
) -> None:
    export.status, export.reason, export.message = to, reason, message
    if to in EXPORT_TERMINAL:
        export.finished_at = await session.scalar(select(func.clock_timestamp()))
    if to is not ExportStatus.RUNNING:
        export.lease_token = None
    await session.flush()
    data = {
        "export": export.name,
        "status": to,
        "reason": reason,
        "message": message,
        "attempt": export.attempts,
    }
    await append_events(session, export.job_id, [EventDraft(EventType.EXPORT, data)])
