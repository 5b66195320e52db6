"""Reads the rows that a plan is made from: one snapshot of queue, nodes and shares."""

from datetime import datetime, timedelta
from math import log
from statistics import median
from typing import Any

from sqlalchemy import Float, Select, column, func, literal, select, true, values
from sqlalchemy import String as SqlString
from sqlalchemy.ext.asyncio import AsyncSession

from app.broker.wake import Queue
from app.db.models import AttemptRow, JobRow, TeamRow, WorkerRow
from app.scheduling.plan import CPU_SHARE
from app.scheduling.types import (
    LOW,
    URGENT,
    ClusterSnapshot,
    Node,
    ResourceRequest,
    Running,
    Share,
    Waiting,
)
from app.workers import repository as workers
from dressage.spec.job import ResourcesSpec
from dressage.spec.status import AttemptKind, JobStatus, WorkerState

LOOKED_AT = 100  # jobs of one team and class that a plan looks at: they run in order anyway
COMPARED = 20  # finished jobs of the same kind that durations are estimated from
DAY, MONTH = timedelta(days=1), timedelta(days=30)
DECAY_SECONDS = DAY.total_seconds() / log(2)  # half of it is forgotten in a day
FORGOTTEN_AFTER = timedelta(days=7)


async def read_snapshot(session: AsyncSession) -> ClusterSnapshot:
    """The queue as it is now, by the database's clock."""
    now = await session.scalar(select(func.clock_timestamp()))
    assert now
    waiting = (await session.execute(_waiting_query())).all()
    running = (await session.execute(_running_query())).all()
    paces = await _paces(session, {row.workload for row in (*waiting, *running)})
    typical = None if all(row.workload in paces for row in waiting) else await _typical(session)
    nodes = await workers.alive(session, Queue.TRAINING)
    return ClusterSnapshot(
        now=now,
        waiting=[_waiting(row, paces, typical) for row in waiting],
        running=[_running(row, now, paces) for row in running],
        nodes=[_node(row) for row in nodes],
        shares=await _shares(session, now),
    )


async def gpu_seconds(session: AsyncSession, now: datetime, window: timedelta) -> dict[str, float]:
    """GPU-seconds of each team in the time before now, running attempts included."""
    end = func.coalesce(AttemptRow.ended_at, now)
    start = func.greatest(AttemptRow.started_at, now - window)
    seconds = func.extract("epoch", end - start)
    rows = await session.execute(
        select(AttemptRow.team, func.sum(AttemptRow.gpus * seconds))
        .where(_touches(now - window), AttemptRow.gpus > 0)
        .group_by(AttemptRow.team)
    )
    return {team: float(total) for team, total in rows}


def _waiting_query() -> Select[Any]:
    """The first jobs of every team and class: cheap however long the queue is."""
    queued = JobRow.status == JobStatus.QUEUED
    teams = select(JobRow.team).where(queued).distinct().subquery()
    classes = values(column("priority", JobRow.priority.type), name="classes").data(
        [(level,) for level in range(URGENT, LOW + 1)]
    )
    first = (
        select(
            JobRow.id,
            JobRow.team,
            JobRow.priority,
            JobRow.arrival,
            JobRow.created_at,
            JobRow.gpus,
            JobRow.spec["resources"].label("resources"),
            JobRow.not_before,
            JobRow.waiting.is_not(None).label("explained"),
            JobRow.workload,
            JobRow.steps,
        )
        .where(queued, JobRow.team == teams.c.team, JobRow.priority == classes.c.priority)
        .order_by(JobRow.arrival)
        .limit(LOOKED_AT)
        .lateral("first")
    )
    return select(first).select_from(teams.join(classes, true()).join(first, true()))


def _running_query() -> Select[Any]:
    return (
        select(
            JobRow.id,
            JobRow.team,
            JobRow.priority,
            JobRow.created_at,
            JobRow.gpus,
            JobRow.spec["resources"].label("resources"),
            JobRow.workload,
            JobRow.steps,
            JobRow.progress,
            JobRow.yielding_to,
            AttemptRow.worker_id,
            AttemptRow.gpu_indexes,
            AttemptRow.started_at,
        )
        .join(AttemptRow, AttemptRow.job_id == JobRow.id)
        .where(AttemptRow.kind == AttemptKind.TRAIN, AttemptRow.ended_at.is_(None))
    )


async def _paces(session: AsyncSession, workloads: set[str]) -> dict[str, float]:
    """Seconds per step of finished jobs of the same kind."""
    if not workloads:
        return {}
    kinds = values(column("workload", SqlString()), name="kinds").data(
        [(workload,) for workload in sorted(workloads)]
    )
    newest = (
        select((JobRow.active_seconds / func.greatest(JobRow.steps, 1)).label("pace"))
        .where(JobRow.workload == kinds.c.workload, JobRow.status == JobStatus.SUCCEEDED)
        .order_by(JobRow.finished_at.desc())
        .limit(COMPARED)
        .lateral("newest")
    )
    middle = func.percentile_cont(0.5).within_group(newest.c.pace)
    rows = await session.execute(
        select(kinds.c.workload, middle)
        .select_from(kinds.join(newest, true()))
        .group_by(kinds.c.workload)
    )
    return {workload: float(pace) for workload, pace in rows}


async def _typical(session: AsyncSession) -> float | None:
    """The usual duration of a job here, for kinds that have never run."""
    newest = await session.scalars(
        select(JobRow.active_seconds)
        .where(JobRow.status == JobStatus.SUCCEEDED)
        .order_by(JobRow.finished_at.desc())
        .limit(COMPARED)
    )
    durations = newest.all()
    return median(durations) if durations else None


def _touches(since: datetime) -> Any:
    return (AttemptRow.ended_at > since) | AttemptRow.ended_at.is_(None)


async def _shares(session: AsyncSession, now: datetime) -> dict[str, Share]:
    teams = (await session.scalars(select(TeamRow))).all()
    daily = monthly = dict[str, float]()
    if any(team.gpu_seconds_per_day is not None for team in teams):
        daily = await gpu_seconds(session, now, DAY)
    if any(team.gpu_seconds_per_month is not None for team in teams):
        monthly = await gpu_seconds(session, now, MONTH)
    recent = await _recent(session, now)
    return {
        team.name: Share(
            weight=team.weight,
            recent=recent.get(team.name, 0.0),
            max_running_gpus=team.max_running_gpus,
            over_budget=_spent("day", team.gpu_seconds_per_day, daily.get(team.name, 0.0))
            or _spent("month", team.gpu_seconds_per_month, monthly.get(team.name, 0.0)),
        )
        for team in teams
    }


async def _recent(session: AsyncSession, now: datetime) -> dict[str, float]:
    """The integral of each attempt's GPUs over its time, weighed by exp(-age / τ)."""
    age_of_start = func.extract("epoch", now - AttemptRow.started_at)
    age_of_end = func.extract("epoch", now - func.coalesce(AttemptRow.ended_at, now))
    weighed = literal(DECAY_SECONDS, Float) * (
        func.exp(-age_of_end / DECAY_SECONDS) - func.exp(-age_of_start / DECAY_SECONDS)
    )
    charged = func.greatest(AttemptRow.gpus, CPU_SHARE) * weighed
    rows = await session.execute(
        select(AttemptRow.team, func.sum(charged))
        .where(AttemptRow.kind == AttemptKind.TRAIN, _touches(now - FORGOTTEN_AFTER))
        .group_by(AttemptRow.team)
    )
    return {team: float(total) for team, total in rows}


def _spent(period: str, limit: float | None, used: float) -> str | None:
    if limit is None or used < limit:
        return None
    return f"team quota used: {used:.0f} of {limit:.0f} GPU-seconds in the last {period}"


def _request(row: Any) -> ResourceRequest:
    return request_of(ResourcesSpec.model_validate({**(row.resources or {}), "gpus": row.gpus}))


def request_of(resources: ResourcesSpec) -> ResourceRequest:
    """What a job asks of a worker."""
    return ResourceRequest(
        gpus=resources.gpus,
        gpu_type=resources.gpu_type,
        min_memory_gb=resources.min_memory_gb,
        labels=frozenset(resources.labels),
    )


def _waiting(row: Any, paces: dict[str, float], typical: float | None) -> Waiting:
    pace = paces.get(row.workload)
    return Waiting(
        job_id=row.id,
        team=row.team,
        priority=row.priority,
        arrival=row.arrival,
        since=row.created_at,
        request=_request(row),
        not_before=row.not_before,
        seconds=typical if pace is None else pace * row.steps,
        explained=row.explained,
    )


def _running(row: Any, now: datetime, paces: dict[str, float]) -> Running:
    return Running(
        job_id=row.id,
        team=row.team,
        priority=row.priority,
        request=_request(row),
        worker_id=row.worker_id,
        since=row.created_at,
        gpu_indexes=tuple(row.gpu_indexes),
        seconds=_seconds_left(row, now, paces.get(row.workload)),
        preemptible=bool((row.resources or {}).get("preemptible")),
        yielding_to=row.yielding_to,
    )


def _seconds_left(row: Any, now: datetime, pace: float | None) -> float | None:
    progress = row.progress or {}
    measured, total = progress.get("seconds_per_step"), progress.get("total_steps")
    if measured and total:
        return max(0.0, float(total - progress.get("step", 0)) * float(measured))
    if pace is None:
        return None
    elapsed: float = (now - row.started_at).total_seconds()
    return max(0.0, pace * float(row.steps) - elapsed)


def _node(row: WorkerRow) -> Node:
    return Node(
        worker_id=row.id,
        gpus=row.gpus,
        gpu_type=row.gpu_type,
        memory_gb=row.gpu_memory_gb,
        labels=frozenset(row.labels),
        state=WorkerState(row.state),
    )
