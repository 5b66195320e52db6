"""The one place where a job's status changes, with its event in the same transaction."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import visible
from app.db.models import EventRow, JobRow
from app.lifecycle.outbox import enqueue_deliveries
from dressage.spec.event import EventType
from dressage.spec.status import TERMINAL, JobStatus, Reason

EVENTS_CHANNEL = "dressage_events"
S = JobStatus
LEAVES = (S.PAUSING, S.PAUSED, S.FAILED, S.CANCELLING, S.QUEUED)  # of work in progress
TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    S.QUEUED: frozenset({S.PREPARING, S.PAUSED, S.FAILED, S.CANCELLED}),
    S.PREPARING: frozenset({S.TRAINING, S.EVALUATING, *LEAVES}),
    S.TRAINING: frozenset({S.EVALUATING, S.EXPORTING, *LEAVES}),
    S.EVALUATING: frozenset({S.EXPORTING, S.SUCCEEDED, S.FAILED, S.CANCELLING, S.QUEUED}),
    S.EXPORTING: frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLING}),
    # It may be over before it notices, and then it is.
    S.PAUSING: frozenset({S.PAUSED, S.QUEUED, S.EXPORTING, S.FAILED, S.CANCELLING}),
    S.PAUSED: frozenset({S.QUEUED, S.CANCELLED}),
    S.CANCELLING: frozenset({S.CANCELLED}),
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset(),
    S.CANCELLED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A bug of ours: the table does not know this way."""


@dataclass(frozen=True)
class EventDraft:
    """An event before it has a number."""

    type: EventType
    data: dict[str, Any]
    time: datetime | None = None


async def find_job(session: AsyncSession, team: str | None, job_id: str) -> JobRow | None:
    """A job that a team (None: an operator) may see."""
    found: JobRow | None = await session.scalar(
        select(JobRow).where(JobRow.id == job_id, visible(JobRow.team, team))
    )
    return found


async def lock_job(session: AsyncSession, job_id: str) -> JobRow | None:
    """The job, locked until the transaction ends."""
    found: JobRow | None = await session.scalar(
        select(JobRow)
        .where(JobRow.id == job_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    return found


async def switch_status(
    session: AsyncSession,
    job: JobRow,
    to: JobStatus,
    *,
    reason: Reason | None = None,
    message: str | None = None,
) -> None:
    """Move a locked job to another status.

    Raises:
        IllegalTransition: The transition table does not allow it.
    """
    if to not in TRANSITIONS[JobStatus(job.status)]:
        raise IllegalTransition(f"{job.id}: {job.status} → {to}")
    job.status, job.reason, job.message = to, reason, message
    now = await session.scalar(select(func.clock_timestamp()))
    assert now
    if to is JobStatus.PREPARING and job.started_at is None:
        job.started_at = now
    if to in TERMINAL:
        job.finished_at = now
    await session.flush()
    await enqueue_deliveries(session, job, now)
    data = {"status": to, "reason": reason, "message": message, "attempt": job.attempts}
    await append_events(session, job.id, [EventDraft(EventType.STATUS, data)])


async def tell_again(session: AsyncSession, job: JobRow, reason: Reason, message: str) -> None:
    """Give a locked job another reason for the status that it has."""
    job.reason, job.message = reason, message
    await session.flush()
    data = {"status": job.status, "reason": reason, "message": message, "attempt": job.attempts}
    await append_events(session, job.id, [EventDraft(EventType.STATUS, data)])


async def end_cancelled(session: AsyncSession, job: JobRow) -> None:
    """End a locked job that was asked to end. What it has produced is kept."""
    await switch_status(
        session,
        job,
        JobStatus.CANCELLED,
        reason=Reason.CANCELLED_BY_USER,
        message="cancelled on request; files made before are kept",
    )


async def pause_waiting(session: AsyncSession, job: JobRow) -> None:
    """Set a locked job aside that no worker holds (any longer)."""
    await switch_status(
        session,
        job,
        JobStatus.PAUSED,
        reason=Reason.PAUSED_BY_USER,
        message="paused on request; resume to go on",
    )


async def append_events(
    session: AsyncSession, job_id: str, drafts: Sequence[EventDraft]
) -> int | None:
    """Number and store events. Returns the last sequence number, or None without such a job."""
    if not drafts:
        return None
    last = await session.scalar(
        update(JobRow)
        .where(JobRow.id == job_id)
        .values(last_event_seq=JobRow.last_event_seq + len(drafts))
        .returning(JobRow.last_event_seq)
        .execution_options(synchronize_session=False)
    )
    if last is None:
        return None
    first = last - len(drafts) + 1
    # Sent at commit, to whoever follows the job.
    now = await session.scalar(
        select(func.clock_timestamp(), func.pg_notify(EVENTS_CHANNEL, job_id))
    )
    await session.execute(
        insert(EventRow),
        [
            {
                "job_id": job_id,
                "seq": first + at,
                "type": draft.type,
                "data": draft.data,
                "time": draft.time or now,
            }
            for at, draft in enumerate(drafts)
        ],
    )
    return int(last)
