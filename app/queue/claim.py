"""Leases on jobs: take one, keep it, lose it.

Every write of a worker goes through `fenced`: a worker whose lease has passed to another one cannot
change anything.
"""

import secrets
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import new_id
from app.db.models import AttemptRow, JobRow
from app.jobs.lifecycle import end_cancelled, lock_job, pause_waiting, switch_status
from dressage.spec.status import JobStatus, Reason

CLAIM_LOCK = 0x64726573  # one claim at a time: SKIP LOCKED alone cannot guard an order


class StaleLease(Exception):
    """The lease has expired or was taken back: drop the work."""


@dataclass(frozen=True)
class Lease:
    """A worker's claim on one attempt of a job."""

    job_id: str
    attempt: int
    token: str


async def claim(
    session: AsyncSession, *, worker_id: str, gpus: int, lease_seconds: float
) -> Lease | None:
    """Take the job that is next, if there is one for this many free GPUs.

    Order: priority class, then first come first served.
    """
    await session.execute(select(func.pg_advisory_xact_lock(CLAIM_LOCK)))
    job = await session.scalar(
        select(JobRow)
        .where(JobRow.status == JobStatus.QUEUED, JobRow.gpus <= gpus)
        .order_by(JobRow.priority, JobRow.arrival)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    if job is None:
        return None
    job.attempts += 1
    attempt = AttemptRow(
        id=new_id("attempt"),
        job_id=job.id,
        number=job.attempts,
        worker_id=worker_id,
        lease_token=secrets.token_hex(16),
        lease_expires_at=func.clock_timestamp() + timedelta(seconds=lease_seconds),
    )
    session.add(attempt)
    await switch_status(session, job, JobStatus.PREPARING)
    return Lease(job.id, attempt.number, attempt.lease_token)


async def heartbeat(session: AsyncSession, lease: Lease, lease_seconds: float) -> JobStatus:
    """Extend a lease and tell what has become of the job.

    Raises:
        StaleLease: It has expired or ended.
    """
    job_id = await session.scalar(
        update(AttemptRow)
        .where(
            AttemptRow.lease_token == lease.token,
            AttemptRow.ended_at.is_(None),
            AttemptRow.lease_expires_at > func.clock_timestamp(),
        )
        .values(lease_expires_at=func.clock_timestamp() + timedelta(seconds=lease_seconds))
        .returning(AttemptRow.job_id)
    )
    if job_id is None:
        raise StaleLease(lease.job_id)
    job = await session.get_one(JobRow, job_id, populate_existing=True)
    return JobStatus(job.status)


async def fenced(session: AsyncSession, lease: Lease) -> JobRow:
    """The job, locked, for a worker that still owns it.

    Raises:
        StaleLease: It does not; nothing may be written.
    """
    job = await lock_job(session, lease.job_id)
    attempt = await session.scalar(
        select(AttemptRow)
        .where(AttemptRow.lease_token == lease.token, AttemptRow.ended_at.is_(None))
        .with_for_update()
    )
    if job is None or attempt is None:
        raise StaleLease(lease.job_id)
    return job


async def end_attempt(session: AsyncSession, lease: Lease, outcome: str) -> None:
    """Give the lease up."""
    await session.execute(
        update(AttemptRow)
        .where(AttemptRow.lease_token == lease.token, AttemptRow.ended_at.is_(None))
        .values(ended_at=func.clock_timestamp(), outcome=outcome)
    )


async def release(session: AsyncSession, lease: Lease, message: str) -> None:
    """Give a job back to the queue, where it keeps its place; not a failed try.

    Raises:
        StaleLease: It is somebody else's by now.
    """
    job = await fenced(session, lease)
    await end_attempt(session, lease, "released")
    if JobStatus(job.status) is JobStatus.CANCELLING:
        await end_cancelled(session, job)
    elif JobStatus(job.status) is JobStatus.PAUSING:
        await pause_waiting(session, job)
    else:
        await switch_status(session, job, JobStatus.QUEUED, message=message)


async def reap(session: AsyncSession, *, max_attempts: int) -> list[str]:
    """End every expired lease: requeue its job, or fail it after too many lost workers.

    Returns:
        The ids of the jobs concerned.
    """
    expired = await session.scalars(
        select(AttemptRow.job_id).where(
            AttemptRow.ended_at.is_(None), AttemptRow.lease_expires_at < func.clock_timestamp()
        )
    )
    reaped = []
    for job_id in expired.all():
        # The same order of locks as `fenced`: first the job, then its attempt.
        job = await lock_job(session, job_id)
        attempt = await session.scalar(
            select(AttemptRow)
            .where(
                AttemptRow.job_id == job_id,
                AttemptRow.ended_at.is_(None),
                AttemptRow.lease_expires_at < func.clock_timestamp(),
            )
            .with_for_update()
        )
        if job is None or attempt is None:
            continue
        attempt.ended_at = await session.scalar(select(func.clock_timestamp()))
        attempt.outcome = "lost"
        await _after_loss(session, job, attempt, max_attempts)
        reaped.append(job_id)
    return reaped


async def _after_loss(
    session: AsyncSession, job: JobRow, attempt: AttemptRow, max_attempts: int
) -> None:
    lost = f"worker {attempt.worker_id} was lost in attempt {attempt.number}"
    if JobStatus(job.status) is JobStatus.CANCELLING:
        await end_cancelled(session, job)
        return
    if JobStatus(job.status) is JobStatus.PAUSING:
        await pause_waiting(session, job)
        return
    tries = await session.scalar(
        select(func.count())
        .select_from(AttemptRow)
        .where(AttemptRow.job_id == job.id, AttemptRow.outcome == "lost")
    )
    if (tries or 0) >= max_attempts:
        await switch_status(
            session,
            job,
            JobStatus.FAILED,
            reason=Reason.WORKER_LOST,
            message=f"{lost}; {tries} tries are the limit",
        )
    else:
        await switch_status(
            session,
            job,
            JobStatus.QUEUED,
            reason=Reason.WORKER_LOST,
            message=f"{lost}; queued again",
        )
