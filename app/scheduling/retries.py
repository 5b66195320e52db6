"""Which attempts are repeated.

A failure of the host is, up to a limit and later each time; an error of the job is not.

Out of memory is repeated once, with smaller micro-batches and the same batch.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import AttemptRow, JobRow
from app.lifecycle.jobs import EventDraft, append_events, switch_status
from dressage.spec.event import EventType
from dressage.spec.job import Adjustment, JobSpec
from dressage.spec.status import AttemptOutcome, JobStatus, Reason

RETRYABLE = {
    Reason.WORKER_LOST: AttemptOutcome.LOST,
    Reason.STALLED: AttemptOutcome.STALLED,
    Reason.GPU_FAILED: AttemptOutcome.GPU_FAILED,
    Reason.PROCESS_KILLED: AttemptOutcome.KILLED,
    Reason.DISK_FULL: AttemptOutcome.DISK_FULL,
    Reason.STORAGE_UNAVAILABLE: AttemptOutcome.STORAGE_UNAVAILABLE,
}


@dataclass(frozen=True)
class RetryPolicy:
    """The operator's part: tries in all, and seconds before the third one (doubled after it)."""

    max_attempts: int = 3
    back_off_seconds: float = 10.0

    def delay(self, failures: int) -> timedelta:
        """At once after a first failure, then later and later."""
        return timedelta(seconds=self.back_off_seconds * (2 ** (failures - 1) - 1))


async def from_now(session: AsyncSession, delay: timedelta) -> datetime:
    """A time by the database's clock."""
    now: datetime | None = await session.scalar(select(func.clock_timestamp()))
    assert now
    return now + delay


async def retry_after_failure(
    session: AsyncSession, job: JobRow, policy: RetryPolicy, reason: Reason, message: str
) -> None:
    """Queue a locked job again after a retryable failure, or fail it after too many of them."""
    failures = await session.scalar(
        select(func.count())
        .select_from(AttemptRow)
        .where(AttemptRow.work_id == job.id, AttemptRow.outcome.in_(RETRYABLE.values()))
    )
    assert failures
    if failures >= policy.max_attempts:
        message = f"{message}; {failures} tries are the limit"
        await switch_status(session, job, JobStatus.FAILED, reason=reason, message=message)
        return
    delay = policy.delay(failures)
    soon = f"tried again in {delay.total_seconds():g} s" if delay else "queued again"
    if delay:
        job.not_before = await from_now(session, delay)
    await switch_status(session, job, JobStatus.QUEUED, reason=reason, message=f"{message}; {soon}")


async def halve_micro_batch(session: AsyncSession, job: JobRow, message: str) -> bool:
    """Queue a locked job again with half the memory per forward pass, once. False: it cannot be."""
    spec = JobSpec.model_validate(job.spec)
    training = spec.training
    tried = await session.scalar(
        select(func.count())
        .select_from(AttemptRow)
        .where(AttemptRow.work_id == job.id, AttemptRow.outcome == AttemptOutcome.OUT_OF_MEMORY)
    )
    if tried != 1 or training.batch_size % 2:
        return False
    halved = {
        "batch_size": training.batch_size // 2,
        "gradient_accumulation": training.gradient_accumulation * 2,
    }
    changes = [
        Adjustment(
            field=f"training.{name}",
            requested=getattr(training, name),
            effective=value,
            reason="the memory was full: half the micro-batch, the same batch",
        ).model_dump(mode="json")
        for name, value in halved.items()
    ]
    changed = spec.model_copy(update={"training": training.model_copy(update=halved)})
    job.spec = changed.model_dump(mode="json")
    job.adjustments = [*job.adjustments, *changes]
    await append_events(
        session, job.id, [EventDraft(EventType.ADJUSTMENT, change) for change in changes]
    )
    await switch_status(
        session,
        job,
        JobStatus.QUEUED,
        reason=Reason.OUT_OF_MEMORY,
        message=f"{message}; queued again with half the micro-batch",
    )
    return True
