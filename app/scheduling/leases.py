"""Leases: take work, keep it, give it up, lose it. One for a job, an export or a generation alike.

Every write of a worker goes through `fenced`: a worker whose lease has passed to another one cannot
change anything. What is here besides is the claim of jobs; exports are claimed in `app.exports`.
"""

import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import new_id
from app.db.models import AttemptRow, JobRow, WorkerRow
from app.lifecycle.jobs import end_cancelled, lock_job, pause_waiting, switch_status
from app.scheduling.plan import plan
from app.scheduling.retries import RetryPolicy, retry_after_failure
from app.scheduling.snapshot import read_snapshot
from app.scheduling.types import ClusterSnapshot, Placement
from dressage.spec.status import AttemptKind, AttemptOutcome, JobStatus, Reason

EPOCH = datetime.fromtimestamp(0, UTC)
CLAIM_LOCK = 0x64726573  # one claim at a time: SKIP LOCKED alone cannot guard an order or a quota


class StaleLease(Exception):
    """The lease has expired or was taken back: drop the work."""


@dataclass(frozen=True)
class Lease:
    """A worker's hold on one attempt.

    Attributes:
        kind: What is worked on.
        work_id: The job, the export or the generation.
        job_id: The job it belongs to.
        attempt: Number of the try, from 1.
        token: Proves the hold.
        gpu_indexes: Which of the worker's GPUs it may use.
    """

    kind: AttemptKind
    work_id: str
    job_id: str
    attempt: int
    token: str
    gpu_indexes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Claim:
    """What a look at the queue gave: a lease, if any, and who else should look.

    Attributes:
        lease: On the job that was placed on this worker, if one was.
        others: Workers on which the plan places jobs, next job first.
    """

    lease: Lease | None = None
    others: tuple[str, ...] = ()


async def claim(session: AsyncSession, worker_id: str) -> Claim:
    """Take the next job that the plan places on this worker."""
    await session.execute(select(func.pg_advisory_xact_lock(CLAIM_LOCK)))
    snapshot = await read_snapshot(session)
    placed = [placement for placement in plan(snapshot) if placement.worker_id]
    places = dict.fromkeys(p.worker_id for p in placed if p.worker_id)
    others = tuple(name for name in places if name != worker_id)
    for placement in placed:
        if placement.worker_id == worker_id:
            lease = await _take(session, snapshot, placement, worker_id)
            if lease:
                return Claim(lease, others)
    return Claim(others=others)


async def _take(
    session: AsyncSession, snapshot: ClusterSnapshot, placement: Placement, worker_id: str
) -> Lease | None:
    job = await lock_job(session, placement.job.job_id)
    if job is None or job.status != JobStatus.QUEUED:
        return None  # cancelled or paused since we looked
    job.attempts += 1
    job.not_before = job.waiting = None
    lease = await open_lease(
        session,
        job,
        kind=AttemptKind.TRAIN,
        work_id=job.id,
        attempt=job.attempts,
        worker_id=worker_id,
        gpu_indexes=snapshot.free_gpus(worker_id)[: job.gpus],
    )
    await switch_status(session, job, JobStatus.PREPARING)
    return lease


async def open_lease(
    session: AsyncSession,
    job: JobRow,
    *,
    kind: AttemptKind,
    work_id: str,
    attempt: int,
    worker_id: str,
    gpu_indexes: tuple[int, ...] = (),
) -> Lease:
    """Begin an attempt at work whose row is locked."""
    number = await session.scalar(
        select(func.coalesce(func.max(AttemptRow.number), 0) + 1).where(
            AttemptRow.work_id == work_id
        )
    )
    token = secrets.token_hex(16)
    session.add(
        AttemptRow(
            id=new_id("attempt"),
            kind=kind,
            work_id=work_id,
            job_id=job.id,
            number=number,
            team=job.team,
            worker_id=worker_id,
            gpus=len(gpu_indexes),
            gpu_indexes=list(gpu_indexes),
            lease_token=token,
        )
    )
    return Lease(kind, work_id, job.id, attempt, token, gpu_indexes)


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
    job = await session.get(JobRow, job_id, populate_existing=True) if job_id else None
    if job is None:
        raise StaleLease(lease.work_id)
    return JobStatus(job.status)


async def fenced(session: AsyncSession, lease: Lease) -> tuple[JobRow, AttemptRow]:
    """Job and attempt, locked, for a worker that still holds the lease.

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
        raise StaleLease(lease.work_id)
    return job, attempt


async def close_lease(session: AsyncSession, work_id: str, outcome: AttemptOutcome) -> float | None:
    """End the open attempt at some work. Returns its seconds; None: there is no open one."""
    seconds = await session.scalar(
        update(AttemptRow)
        .where(AttemptRow.work_id == work_id, AttemptRow.ended_at.is_(None))
        .values(ended_at=func.clock_timestamp(), outcome=outcome)
        .returning(func.extract("epoch", AttemptRow.ended_at - AttemptRow.started_at))
    )
    return None if seconds is None else float(seconds)


async def close_all(session: AsyncSession, job_id: str, outcome: AttemptOutcome) -> None:
    """End every open attempt at a job and what belongs to it; their workers find out."""
    await session.execute(
        update(AttemptRow)
        .where(AttemptRow.job_id == job_id, AttemptRow.ended_at.is_(None))
        .values(ended_at=func.clock_timestamp(), outcome=outcome)
    )


async def open_leases(session: AsyncSession) -> dict[str, int]:
    """Heartbeats of every open attempt, by lease token."""
    rows = await session.execute(
        select(AttemptRow.lease_token, AttemptRow.heartbeats).where(AttemptRow.ended_at.is_(None))
    )
    return {row.lease_token: row.heartbeats for row in rows}


async def lock_silent(
    session: AsyncSession, silent: Mapping[str, int], kinds: Collection[AttemptKind]
) -> AsyncIterator[tuple[JobRow, AttemptRow]]:
    """Job and attempt, locked, of each lease that still stands where it stood.

    Args:
        session: A transaction.
        silent: Lease tokens, with the heartbeats at which they have stood still.
        kinds: Which kinds of work are wanted.
    """
    for token, heartbeats in silent.items():
        still = (
            AttemptRow.lease_token == token,
            AttemptRow.heartbeats == heartbeats,
            AttemptRow.kind.in_(kinds),
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
        # Until it says again that it is alive, no plan counts on this worker.
        await session.execute(
            update(WorkerRow).where(WorkerRow.id == attempt.worker_id).values(heartbeat_at=EPOCH)
        )
        yield job, attempt


async def reap(session: AsyncSession, silent: Mapping[str, int], policy: RetryPolicy) -> list[str]:
    """End silent leases on jobs: they are queued again, or have failed too often.

    Returns:
        The ids of the jobs concerned.
    """
    reaped = []
    async for job, attempt in lock_silent(session, silent, [AttemptKind.TRAIN]):
        lost = f"worker {attempt.worker_id} was lost in attempt {attempt.number}"
        await end_lost(session, job, policy, AttemptOutcome.LOST, Reason.WORKER_LOST, lost)
        reaped.append(job.id)
    return reaped


async def end_attempt(session: AsyncSession, job: JobRow, outcome: AttemptOutcome) -> None:
    """Give the lease on a locked job up. An attempt that has ended stays as it is."""
    job.active_seconds += await close_lease(session, job.id, outcome) or 0.0
    job.yielding_to = None


async def release(session: AsyncSession, lease: Lease, message: str) -> None:
    """Give a job back to the queue, where it keeps its place; not a failed try.

    Raises:
        StaleLease: It is somebody else's by now.
    """
    job, _ = await fenced(session, lease)
    await requeue(session, job, message)


async def requeue(session: AsyncSession, job: JobRow, message: str) -> None:
    """End the open attempt of a locked job, which goes to where it was going."""
    reason = Reason.PREEMPTED if job.reason == Reason.PREEMPTED else None
    await end_attempt(session, job, AttemptOutcome.RELEASED)
    if not await _left_as_asked(session, job):
        await switch_status(session, job, JobStatus.QUEUED, reason=reason, message=message)


async def end_lost(
    session: AsyncSession,
    job: JobRow,
    policy: RetryPolicy,
    outcome: AttemptOutcome,
    reason: Reason,
    message: str,
) -> None:
    """End the attempt of a locked job that failed for no fault of its own."""
    await end_attempt(session, job, outcome)
    if not await _left_as_asked(session, job):
        await retry_after_failure(session, job, policy, reason, message)


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
