"""`/jobs`: submit, look, change, follow."""

import csv
import io
from typing import Annotated

from fastapi import Body, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from app import examples
from app.artifacts import repository as artifacts
from app.db.models import JobRow
from app.db.paging import next_cursor
from app.dependencies import (
    CurrentCaller,
    InTransaction,
    Limit,
    Parts,
    Position,
    Transaction,
    VisibleJob,
    VisibleTeam,
)
from app.gate import ApiRouter
from app.jobs import repository, service
from app.jobs.admission import admit
from app.jobs.dependencies import CachedJobs, LiveFeed, Streams
from app.jobs.serialize import serialize_jobs
from app.scheduling.explain import warnings_of
from dressage.spec.artifact import Checkpoint, checkpoint_name
from dressage.spec.event import (
    Evaluation,
    Evaluations,
    Event,
    EventPage,
    EventType,
    Metrics,
    MetricsRow,
    RolloutPage,
)
from dressage.spec.job import EXAMPLE, DryRun, Job, JobPage, JobSpec
from dressage.spec.status import JobStatus

router = ApiRouter(prefix="/jobs", tags=["jobs"])


@router.post(
    "",
    status_code=201,
    response_model=Job | DryRun,
    responses={
        200: {"model": Job | DryRun, "description": "Dry run, or a repeated key."},
        **examples.shown(examples.JOB, 201),
    },
)
async def submit_job(
    spec: Annotated[JobSpec, Body(openapi_examples={"tool agent": {"value": EXAMPLE}})],
    transaction: InTransaction,
    caller: CurrentCaller,
    parts: Parts,
    response: Response,
    dry_run: Annotated[bool, Query(description="Check everything, store nothing.")] = False,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Job | DryRun:
    """Put a job into the queue. The answer has the effective specification."""
    if dry_run:
        admitted = await admit(transaction.session, caller.team, spec, parts.policy, caller.role)
        response.status_code = 200
        waits = await warnings_of(transaction.session, admitted.spec.resources)
        warnings = (*admitted.warnings, *waits)
        return DryRun(spec=admitted.spec, adjustments=admitted.adjustments, warnings=warnings)
    job, is_new = await service.submit(
        transaction.session,
        transaction.wakes,
        parts.policy,
        team=caller.team,
        role=caller.role,
        requested=spec,
        idempotency_key=idempotency_key,
    )
    return await _created(response, transaction, job, is_new=is_new)


@router.post(
    "/preflight",
    status_code=201,
    responses={
        200: {"model": Job, "description": "A repeated key."},
        **examples.shown({**examples.JOB, "status": "queued", "exports": []}, 201),
    },
)
async def submit_preflight(
    spec: Annotated[JobSpec, Body(openapi_examples={"tool agent": {"value": EXAMPLE}})],
    transaction: InTransaction,
    caller: CurrentCaller,
    parts: Parts,
    response: Response,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Job:
    """Only look whether a job can learn: its `result.preflight` says go, warn or stop."""
    job, is_new = await service.submit(
        transaction.session,
        transaction.wakes,
        parts.policy,
        team=caller.team,
        role=caller.role,
        requested=service.preflight_of(spec),
        idempotency_key=idempotency_key,
    )
    return await _created(response, transaction, job, is_new=is_new)


@router.get("", responses=examples.shown(examples.page(examples.JOB, "17")))
async def list_jobs(
    transaction: InTransaction,
    team: VisibleTeam,
    position: Position,
    status: JobStatus | None = None,
    name: str | None = None,
    of_team: Annotated[str | None, Query(alias="team")] = None,
    limit: Limit = 50,
) -> JobPage:
    """Jobs, newest first."""
    if of_team and team not in (None, of_team):  # another team's jobs are not this one's business
        return JobPage(items=())
    rows = await repository.page(
        transaction.session, of_team or team, status=status, name=name, before=position, limit=limit
    )
    return JobPage(
        items=await serialize_jobs(transaction.session, rows), next_cursor=next_cursor(rows, limit)
    )


@router.get("/{job_id}", response_model=Job, responses=examples.shown(examples.JOB))
async def get_job(job_id: str, team: VisibleTeam, jobs: CachedJobs) -> Response:
    """One job."""
    text = await jobs.json(team, job_id)
    return Response(text, media_type="application/json")


@router.post(
    "/{job_id}/cancel",
    responses=examples.shown({**examples.JOB, "status": "cancelling"}),
)
async def cancel_job(job_id: str, transaction: InTransaction, team: VisibleTeam) -> Job:
    """End a job. Artifacts and history stay."""
    job = await service.cancel(transaction.session, team, job_id)
    return (await serialize_jobs(transaction.session, [job]))[0]


@router.post(
    "/{job_id}/pause",
    responses=examples.shown({**examples.JOB, "status": "pausing"}),
)
async def pause_job(job_id: str, transaction: InTransaction, team: VisibleTeam) -> Job:
    """Set a job aside after its current step; its GPU is free then."""
    job = await service.pause(transaction.session, team, job_id)
    return (await serialize_jobs(transaction.session, [job]))[0]


@router.post(
    "/{job_id}/retry",
    status_code=201,
    responses=examples.shown({**examples.JOB, "status": "queued"}, 201),
)
async def retry_job(
    job_id: str, transaction: InTransaction, caller: CurrentCaller, parts: Parts, response: Response
) -> Job:
    """Submit a failed or cancelled job again, as a new one."""
    job = await service.retry(
        transaction.session,
        transaction.wakes,
        parts.policy,
        caller.visible_team,
        job_id,
        caller.role,
    )
    return await _created(response, transaction, job, is_new=True)


@router.delete("/{job_id}", status_code=204)
async def delete_job(job_id: str, transaction: InTransaction, team: VisibleTeam) -> Response:
    """Remove an ended job: history, rollouts and files."""
    await service.delete(transaction.session, team, job_id)
    return Response(status_code=204)


@router.post(
    "/{job_id}/resume",
    responses=examples.shown({**examples.JOB, "status": "queued"}),
)
async def resume_job(job_id: str, transaction: InTransaction, team: VisibleTeam) -> Job:
    """Continue a paused job from its newest checkpoint."""
    job = await service.resume(transaction.session, transaction.wakes, team, job_id)
    return (await serialize_jobs(transaction.session, [job]))[0]


@router.get(
    "/{job_id}/events",
    response_model=EventPage,
    responses={
        200: {
            "description": "A page, or a stream when `Accept` is `text/event-stream`.",
            "content": {
                "application/json": {"example": examples.page(examples.EVENT, "41")},
                "text/event-stream": {"schema": {"type": "string"}},
            },
        }
    },
)
async def job_events(
    job: VisibleJob,
    request: Request,
    transaction: InTransaction,
    team: VisibleTeam,
    feed: LiveFeed,
    streams: Streams,
    position: Position,
    type: EventType | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    last_event_id: Annotated[
        str | None, Header(pattern=r"^[0-9]{0,18}$", description="The last one that was seen.")
    ] = None,
) -> EventPage | StreamingResponse:
    """A job's history: a page, or replay and live tail by server-sent events."""
    after = int(last_event_id) if last_event_id else position or 0
    if "text/event-stream" in request.headers.get("accept", ""):
        await streams.require_room(request)
        return StreamingResponse(
            streams.of(request, feed.follow(team, job.id, after, type)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
    return await _event_page(transaction, job.id, after, limit, type)


@router.get("/{job_id}/logs", responses=examples.shown(examples.page(examples.LOG)))
async def job_logs(
    job: VisibleJob,
    transaction: InTransaction,
    position: Position,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> EventPage:
    """Log lines alone."""
    return await _event_page(transaction, job.id, position or 0, limit, EventType.LOG)


@router.get("/{job_id}/checkpoints", responses=examples.shown([examples.CHECKPOINT]))
async def job_checkpoints(job: VisibleJob, transaction: InTransaction) -> tuple[Checkpoint, ...]:
    """The steps that have a checkpoint; those with a file can be exported."""
    session = transaction.session
    rows = await repository.events(session, job.id, after=0, type_=EventType.CHECKPOINT)
    kept = await artifacts.checkpoints(session, job.id)
    # One made again after a restart counts once, as it was made last.
    times = {row.data["step"]: row.time for row in rows}
    return tuple(
        Checkpoint(
            step=step, time=times[step], file=checkpoint_name(step) if step in kept else None
        )
        for step in sorted(times)
    )


@router.get(
    "/{job_id}/metrics",
    response_model=Metrics,
    responses={
        200: {
            "content": {
                "application/json": {"example": {"items": [examples.METRICS_ROW]}},
                "text/csv": {"schema": {"type": "string"}},
            }
        }
    },
)
async def job_metrics(
    job: VisibleJob, request: Request, transaction: InTransaction
) -> Metrics | PlainTextResponse:
    """The whole metric history, as JSON or (`Accept: text/csv`) as CSV."""
    rows = await repository.events(transaction.session, job.id, after=0, type_=EventType.METRICS)
    # A step repeated after a restart counts once, as it ran last.
    by_step = {
        row.data["step"]: MetricsRow(
            step=row.data["step"], time=row.time, values=row.data["values"]
        )
        for row in rows
    }
    metrics = Metrics(items=tuple(by_step[step] for step in sorted(by_step)))
    if "text/csv" in request.headers.get("accept", ""):
        return PlainTextResponse(_csv(metrics), media_type="text/csv")
    return metrics


@router.get("/{job_id}/rollouts", responses=examples.shown(examples.page(examples.ROLLOUT)))
async def job_rollouts(
    job: VisibleJob,
    transaction: InTransaction,
    position: Position,
    phase: Annotated[str | None, Query(description="`train`, `before`, `after`, …")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> RolloutPage:
    """Stored rollouts with messages, tokens and verdicts."""
    rows = await repository.rollouts(
        transaction.session, job.id, phase=phase, after=position or 0, limit=limit
    )
    return RolloutPage(
        items=tuple(map(repository.rollout_of, rows)), next_cursor=next_cursor(rows, limit)
    )


@router.get(
    "/{job_id}/evaluations",
    responses=examples.shown({"items": [examples.EVALUATION], "gain": examples.GAIN}),
)
async def job_evaluations(job: VisibleJob, transaction: InTransaction) -> Evaluations:
    """Held-out evaluations, and what training gained."""
    rows = await repository.events(transaction.session, job.id, after=0, type_=EventType.EVALUATION)
    # One repeated after a restart counts once, as it ran last.
    by_name = {row.data["name"]: Evaluation.model_validate(row.data) for row in rows}
    result = job.result or {}
    return Evaluations(
        items=tuple(by_name.values()),
        gain=result.get("gain"),
        reward_gain=result.get("reward_gain"),
    )


async def _created(
    response: Response, transaction: Transaction, job: JobRow, *, is_new: bool
) -> Job:
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"/jobs/{job.id}"
    return (await serialize_jobs(transaction.session, [job]))[0]


async def _event_page(
    transaction: Transaction, job_id: str, after: int, limit: int, type_: EventType | None
) -> EventPage:
    rows = await repository.events(
        transaction.session, job_id, after=after, limit=limit, type_=type_
    )
    items = tuple(map(Event.model_validate, rows))
    following = str(rows[-1].seq) if len(rows) == limit else None
    return EventPage(items=items, next_cursor=following)


def _csv(metrics: Metrics) -> str:
    names = sorted({name for row in metrics.items for name in row.values})
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["step", "time", *names])
    for row in metrics.items:
        writer.writerow([row.step, row.time.isoformat(), *(row.values.get(n) for n in names)])
    return text.getvalue()
