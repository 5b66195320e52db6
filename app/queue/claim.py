"""Leases on jobs: take one, keep it, give it up, lose it.

Every write of a worker goes through `fenced`: a worker whose lease has passed to another one cannot
change anything.
"""

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import new_id
from app.db.models import AttemptRow, JobRow, WorkerRow
from app.jobs.lifecycle import end_cancelled, lock_job, pause_waiting, switch_status
from app.queue.picture import free_gpus, read_picture
from app.queue.plan import Picture, Verdict, plan
from app.queue.retries import Outcome, RetryPolicy, retry_or_fail
from dressage.spec.status import JobStatus, Reason

EPOCH = datetime.fromtimestamp(0, UTC)
CLAIM_LOCK = 0x64726573  # one claim at a time: SKIP LOCKED alone cannot guard an order or a quota


class StaleLease(Exception):
    """The lease has expired or was taken back: drop the work."""


@dataclass(frozen=True)
class Lease:
    """A worker's claim on one attempt of a job, and which of its GPUs it may use."""

    job_id: str
    attempt: int
    token: str
    gpu_indexes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Claim:
    """What a look at the queue gave: a lease, if any, and who else should look.

    Attributes:
        lease: The job that was placed on this worker, if one was.
        others: Workers on which the plan places jobs, next job first.
    """

    lease: Lease | None = None
    others: tuple[str, ...] = ()


async def claim(session: AsyncSession, worker_id: str) -> Claim:
    """Take the next job that the plan places on this worker."""
    await session.execute(select(func.pg_advisory_xact_lock(CLAIM_LOCK)))
    picture = await read_picture(session)
    placed = [verdict for verdict in plan(picture) if verdict.worker_id]
    places = dict.fromkeys(v.worker_id for v in placed if v.worker_id)
    others = tuple(name for name in places if name != worker_id)
    for verdict in placed:
        if verdict.worker_id == worker_id:
            lease = await _take(session, picture, verdict, worker_id)
            if lease:
                return Claim(lease, others)
    return Claim(others=others)


async def _take(
    session: AsyncSession, picture: Picture, verdict: Verdict, worker_id: str
) -> Lease | None:
    job = await lock_job(session, verdict.job.job_id)
    if job is None or job.status != JobStatus.QUEUED:
        return None  # cancelled or paused since we looked
    machine = next(m for m in picture.machines if m.worker_id == worker_id)
    job.attempts += 1
    job.not_before = job.waiting = None
    attempt = AttemptRow(
        id=new_id("attempt"),
        job_id=job.id,
        number=job.attempts,
        team=job.team,
        worker_id=worker_id,
        gpus=job.gpus,
        gpu_indexes=list(free_gpus(picture, machine)[: job.gpus]),
        lease_token=secrets.token_hex(16),
    )
    session.add(attempt)
    await switch_status(session, job, JobStatus.PREPARING)
    return Lease(job.id, attempt.number, attempt.lease_token, tuple(attempt.gpu_indexes))


async def heartbeat(session: AsyncSession, lease: Lease) -> JobStatus:
    """Say that the worker is alive, and hear what has become of the job.

    Raises:
        StaleLease: The lease has ended.
    """
    job_id = await session.scalar(
        update(AttemptRow)
        .where(AttemptRow.lease_token == lease.token, AttemptRow.ended_at.is_(None))
        .values(heartbeats=AttemptRow.heartbeats + 1)
        .returning(AttemptRow.job_id)
    )
    if job_id is None:
        raise StaleLease(lease.job_id)
    job = await session.get_one(JobRow, job_id, populate_existing=True)
    return JobStatus(job.status)


async def fenced(session: AsyncSession, lease: Lease) -> tuple[JobRow, AttemptRow]:
    """Job and attempt, locked, for a worker that still owns it.

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
    return job, attempt


async def end_attempt(session: AsyncSession, job: JobRow, outcome: Outcome) -> None:
    """Give the lease on a locked job up. An attempt that has ended stays as it is."""
    seconds = await session.scalar(
        update(AttemptRow)
        .where(AttemptRow.job_id == job.id, AttemptRow.ended_at.is_(None))
        .values(ended_at=func.clock_timestamp(), outcome=outcome)
        .returning(func.extract("epoch", AttemptRow.ended_at - AttemptRow.started_at))
    )
    if seconds is not None:
        job.active_seconds += float(seconds)
    job.yielding_to = None


async def release(session: AsyncSession, lease: Lease, message: str) -> None:
    """Give a job back to the queue, where it keeps its place; not a failed try.

    Raises:
        StaleLease: It is somebody else's by now.
    """
    job, _ = await fenced(session, lease)
    await put_back(session, job, message)


async def put_back(session: AsyncSession, job: JobRow, message: str) -> None:
    """End the open attempt of a locked job, which goes to where it was going."""
    reason = Reason.PREEMPTED if job.reason == Reason.PREEMPTED else None
    await end_attempt(session, job, Outcome.RELEASED)
    if not await _left_as_asked(session, job):
        await switch_status(session, job, JobStatus.QUEUED, reason=reason, message=message)


async def _left_as_asked(session: AsyncSession, job: JobRow) -> bool:
    """End or set aside a locked job that a user wants so. False: nobody does."""
    status = JobStatus(job.status)
    if status is JobStatus.CANCELLING:
        await end_cancelled(session, job)
        return True
    if status is JobStatus.PAUSING and job.reason != Reason.PREEMPTED:
        await pause_waiting(session, job)
        return True
    return False


async def open_leases(session: AsyncSession) -> dict[str, int]:
    """Heartbeats of every open attempt, by lease token."""
    rows = await session.execute(
        select(AttemptRow.lease_token, AttemptRow.heartbeats).where(AttemptRow.ended_at.is_(None))
    )
    return {row.lease_token: row.heartbeats for row in rows}


async def reap(session: AsyncSession, silent: dict[str, int], policy: RetryPolicy) -> list[str]:
    """End leases that have stood still: their jobs are queued again, or have failed too often.

    Args:
        session: A transaction.
        silent: Lease tokens, with the heartbeats at which they have stood still.
        policy: How often, and how soon, a job is tried again.

    Returns:
        The ids of the jobs concerned.
    """
    reaped = []
    for token, heartbeats in silent.items():
        still = (
            AttemptRow.lease_token == token,
            AttemptRow.heartbeats == heartbeats,
            AttemptRow.ended_at.is_(None),
        )
        job_id = await session.scalar(select(AttemptRow.job_id).where(*still))
        if job_id is None:
            continue
        # The same order of locks as `fenced`: first the job, then its attempt.
        job = await lock_job(session, job_id)
        attempt = await session.scalar(select(AttemptRow).where(*still).with_for_update())
        if job is None or attempt is None:
            continue
        # Until it says again that it is alive, no plan counts on it.
        await session.execute(
            update(WorkerRow).where(WorkerRow.id == attempt.worker_id).values(heartbeat_at=EPOCH)
        )
        lost = f"worker {attempt.worker_id} was lost in attempt {attempt.number}"
        await end_lost(session, job, policy, Outcome.LOST, Reason.WORKER_LOST, lost)
        reaped.append(job_id)
    return reaped


async def end_lost(
    session: AsyncSession,
    job: JobRow,
    policy: RetryPolicy,
    outcome: Outcome,
    reason: Reason,
    message: str,
) -> None:
    """End the attempt of a locked job that failed for no fault of its own."""
    await end_attempt(session, job, outcome)
    if not await _left_as_asked(session, job):
        await retry_or_fail(session, job, policy, reason, message)
