"""What a run's lines become in the database."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import JobRow
from app.jobs import repository
from app.lifecycle.jobs import EventDraft, append_events, switch_status
from dressage.spec.event import EventType
from dressage.spec.status import JobStatus

ROLLOUT_SUMMARY = ("id", "phase", "step", "case_id", "index", "reward", "stop_reason")


async def store_events(session: AsyncSession, job: JobRow, drafts: Sequence[EventDraft]) -> None:
    """Store events of a run whose lease was checked in this transaction.

    Rollouts go whole into their own table and as a summary into the history.
    """
    rollouts: list[dict[str, Any]] = []
    pending: list[EventDraft] = []
    for draft in drafts:
        if draft.type is EventType.STATUS:
            await append_events(session, job.id, pending)
            pending = []
            await _follow(session, job, JobStatus(draft.data["status"]))
        elif draft.type is EventType.ROLLOUT:
            rollouts.append(draft.data)
            summary = {name: draft.data[name] for name in ROLLOUT_SUMMARY}
            pending.append(EventDraft(draft.type, summary, draft.time))
        else:
            pending.append(draft)
            _note_progress(job, draft)
    await append_events(session, job.id, pending)
    await repository.save_rollouts(session, job.id, rollouts)


async def _follow(session: AsyncSession, job: JobRow, status: JobStatus) -> None:
    # A job that is being cancelled or paused stays so, whatever its child still says.
    if job.status not in (JobStatus.CANCELLING, JobStatus.PAUSING, status):
        await switch_status(session, job, status)


def _note_progress(job: JobRow, draft: EventDraft) -> None:
    if draft.type is EventType.PROGRESS:
        job.progress = {**job.progress, **draft.data}
    elif draft.type is EventType.METRICS:
        values = draft.data["values"]
        job.progress = {
            **job.progress,
            "reward": values.get("reward"),
            "loss": values.get("loss"),
        }
