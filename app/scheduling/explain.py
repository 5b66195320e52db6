"""Position, reason and estimated start of queued jobs; and who must yield or look."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import JobRow
from app.lifecycle.jobs import lock_job, switch_status
from app.scheduling.plan import forecast, nobody_takes, plan, preemptions
from app.scheduling.snapshot import read_snapshot, request_of
from app.scheduling.types import ClusterSnapshot, Placement
from dressage.spec.job import ResourcesSpec
from dressage.spec.queue import EstimatedStart, QueueEntry, QueueState, Wait
from dressage.spec.status import JobStatus, Reason, WaitReason

# Measured by bench/queue_simulation.py: most starts fall between the two.
EARLY, LATE = 0.6, 1.6
FORECAST_JOBS = 100
PREEMPTED_IN = (JobStatus.PREPARING, JobStatus.TRAINING)


def waits(
    snapshot: ClusterSnapshot, placements: list[Placement], *, estimate: bool = True
) -> dict[str, Wait]:
    """What every queued job waits for, and how long by the durations of jobs like those ahead."""
    near = [placement.job for placement in placements[:FORECAST_JOBS]] if estimate else []
    ahead = replace(snapshot, waiting=near)
    early = forecast(ahead, stretch=EARLY)
    late = forecast(ahead, stretch=LATE)
    return {
        placement.job.job_id: Wait(
            position=placement.position,
            wait_reason=placement.wait_reason,
            reason=placement.reason,
            estimated_start=_range(snapshot.now, early, late, placement.job.job_id),
            looked_at=snapshot.now,
        )
        for placement in placements
    }


async def waiting_for(session: AsyncSession, jobs: Sequence[JobRow]) -> dict[str, Wait]:
    """What some jobs wait for: as the scheduler last saw it, or by a look of our own."""
    queued = [job for job in jobs if job.status == JobStatus.QUEUED]
    stored = {job.id: Wait.model_validate(job.waiting) for job in queued if job.waiting}
    if len(stored) == len(queued):
        return stored
    snapshot = await read_snapshot(session)
    fresh = waits(snapshot, plan(snapshot), estimate=False)  # the scheduler's look adds it
    for job in queued:
        if job.id not in fresh and job.id not in stored:
            fresh[job.id] = await _far_back(session, job, snapshot.now)
    return {job.id: fresh[job.id] for job in queued if job.id in fresh} | stored


async def warnings_of(session: AsyncSession, resources: ResourcesSpec) -> tuple[str, ...]:
    """What a job with such needs would wait for without an end in sight."""
    reason = nobody_takes(await read_snapshot(session), request_of(resources))
    return (f"{reason}: it would wait until one comes",) if reason else ()


async def _far_back(session: AsyncSession, job: JobRow, now: datetime) -> Wait:
    """What is known of a job that no plan looks at yet: so many of its team come first."""
    ahead = await session.scalar(
        select(func.count())
        .select_from(JobRow)
        .where(
            JobRow.status == JobStatus.QUEUED,
            JobRow.team == job.team,
            tuple_(JobRow.priority, JobRow.arrival) < tuple_(job.priority, job.arrival),
        )
    )
    reason = f"behind {ahead} queued jobs of its team"
    return Wait(
        position=(ahead or 0) + 1, wait_reason=WaitReason.BUSY, reason=reason, looked_at=now
    )


async def look(session: AsyncSession, *, explain: bool) -> list[str]:
    """One look at the queue: ask jobs to yield; if wanted, or for new jobs, store why they wait.

    Returns:
        The workers that should look, because the plan has a job for them.
    """
    snapshot = await read_snapshot(session)
    placements = plan(snapshot)
    if explain or not all(job.explained for job in snapshot.waiting):
        await _store(session, snapshot, placements)
    for job_id, for_job in preemptions(snapshot, placements).items():
        await _ask_to_yield(session, job_id, for_job)
    return list(dict.fromkeys(v.worker_id for v in placements if v.worker_id))


async def queue_state(session: AsyncSession, team: str | None) -> QueueState:
    """The whole queue in order of rank; what other teams send stays theirs."""
    snapshot = await read_snapshot(session)
    fresh = waits(snapshot, plan(snapshot))
    rows = await session.scalars(select(JobRow).where(JobRow.id.in_(fresh)))
    jobs = {job.id: job for job in rows}
    items = [_entry(jobs[job_id], wait, team) for job_id, wait in fresh.items() if job_id in jobs]
    total = sum(node.gpus for node in snapshot.nodes)
    held = sum(len(job.gpu_indexes) for job in snapshot.running)
    return QueueState(
        items=tuple(items),
        running=len(snapshot.running),
        gpus=total,
        gpus_free=max(0, total - held),
    )


def _entry(job: JobRow, wait: Wait, team: str | None) -> QueueEntry:
    own = team in (None, job.team)
    return QueueEntry(
        **wait.model_dump(),
        job_id=job.id if own else None,
        name=job.name if own else None,
        team=job.team,
        priority=job.spec.get("priority", "normal"),
        gpus=job.gpus,
        queued_at=job.created_at,
    )


def _range(
    now: datetime, early: dict[str, float], late: dict[str, float], job_id: str
) -> EstimatedStart | None:
    if job_id not in early or job_id not in late:
        return None
    ends = sorted((early[job_id], late[job_id]))
    first, last = (now + timedelta(seconds=seconds) for seconds in ends)
    return EstimatedStart(earliest=first, latest=last)


async def _store(
    session: AsyncSession, snapshot: ClusterSnapshot, placements: list[Placement]
) -> None:
    if not placements:
        return
    rows: list[dict[str, Any]] = [
        {"id": job_id, "waiting": wait.model_dump(mode="json")}
        for job_id, wait in waits(snapshot, placements).items()
    ]
    # Rows that a request has locked at this moment are explained by the next look.
    free = await session.scalars(
        select(JobRow.id)
        .where(JobRow.id.in_([row["id"] for row in rows]), JobRow.status == JobStatus.QUEUED)
        .with_for_update(skip_locked=True)
    )
    unlocked = set(free)
    rows = [row for row in rows if row["id"] in unlocked]
    if rows:
        await session.execute(update(JobRow), rows)


async def _ask_to_yield(session: AsyncSession, job_id: str, for_job: str) -> None:
    job = await lock_job(session, job_id)
    if job is None or JobStatus(job.status) not in PREEMPTED_IN:
        return
    job.yielding_to = for_job
    message = "yields to a job of a higher class after its current step"
    await switch_status(session, job, JobStatus.PAUSING, reason=Reason.PREEMPTED, message=message)
