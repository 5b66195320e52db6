"""What happens to jobs on request: submit, cancel, pause, resume, retry, delete."""

import hashlib
import json

from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import blobs
from app.artifacts import repository as artifacts
from app.broker.wake import PendingWakes
from app.db.base import new_id
from app.db.models import JobRow
from app.exceptions import (
    IdempotencyKeyReused,
    JobFinished,
    JobNotEnded,
    JobNotPausable,
    JobNotPaused,
    JobNotRetryable,
    NotFound,
)
from app.exports.leases import cancel_exports
from app.exports.service import add_exports
from app.jobs import repository
from app.jobs.admission import admit
from app.jobs.admission.suite import missing_suite
from app.lifecycle.jobs import (
    EventDraft,
    append_events,
    end_cancelled,
    lock_job,
    pause_waiting,
    switch_status,
    tell_again,
)
from app.policy import AdmissionPolicy
from app.scheduling.leases import close_all
from app.suites import repository as suites
from app.teams import quotas
from dressage.spec.base import Spec
from dressage.spec.event import EventType
from dressage.spec.job import JobSpec
from dressage.spec.preflight import PreflightSpec
from dressage.spec.status import TERMINAL, AttemptOutcome, JobStatus, Reason
from dressage.spec.team import Role

PAUSES_AT_STEP = "it stops after its current step, with a checkpoint"
PRIORITIES = {"urgent": 0, "high": 1, "normal": 2, "low": 3}


async def submit(
    session: AsyncSession,
    wakes: PendingWakes,
    policy: AdmissionPolicy,
    *,
    team: str,
    requested: JobSpec,
    idempotency_key: str | None,
    role: Role,
) -> tuple[JobRow, bool]:
    """Store a job. Returns it, and whether it is new. The role is that of the key.

    Raises:
        JobInvalid: It cannot run.
        IdempotencyKeyReused: The key came with another body before.
    """
    request_hash = hash_of(requested)
    if idempotency_key:
        known = await repository.by_idempotency_key(session, team, idempotency_key)
        if known:
            return _same_request(known, request_hash), False
    admitted = await admit(session, team, requested, policy, role)
    if not await suites.hold(session, admitted.suite.id):
        raise missing_suite(requested.suite)
    await quotas.require_room(session, team, default=policy.max_queued_jobs)
    spec = admitted.spec
    job = JobRow(
        id=new_id("job"),
        team=team,
        name=spec.name,
        status=JobStatus.QUEUED,
        suite_id=admitted.suite.id,
        spec=spec.model_dump(mode="json"),
        adjustments=[adjustment.model_dump(mode="json") for adjustment in admitted.adjustments],
        priority=PRIORITIES[spec.priority],
        gpus=spec.resources.gpus,
        workload=f"{spec.agent.model} on {admitted.suite.name}",
        steps=admitted.steps,
        progress={},
        idempotency_key=idempotency_key,
        request_hash=request_hash,
    )
    if not await repository.insert_if_new(session, job):  # two requests with one key at once
        assert idempotency_key
        other = await repository.by_idempotency_key(session, team, idempotency_key)
        assert other
        return _same_request(other, request_hash), False
    job = await session.get_one(JobRow, job.id)
    add_exports(session, job, spec.exports)
    drafts = [EventDraft(EventType.STATUS, {"status": JobStatus.QUEUED})]
    drafts += [
        EventDraft(EventType.ADJUSTMENT, adjustment.model_dump(mode="json"))
        for adjustment in admitted.adjustments
    ]
    drafts += [
        EventDraft(EventType.WARNING, {"code": "admission", "message": warning})
        for warning in admitted.warnings
    ]
    await append_events(session, job.id, drafts)
    wakes.training()
    return job, True


async def cancel(session: AsyncSession, team: str | None, job_id: str) -> JobRow:
    """End a job: at once while it waits, through its worker while it runs.

    Raises:
        NotFound: There is no such job.
        JobFinished: It has ended already.
    """
    job = await _locked(session, team, job_id)
    status = JobStatus(job.status)
    if status in TERMINAL:
        raise JobFinished(f"the job has {status} already; there is nothing to cancel")
    if status is JobStatus.CANCELLING:
        return job
    running = await cancel_exports(session, job.id)
    waiting = status in (JobStatus.QUEUED, JobStatus.PAUSED)
    if not waiting:
        await switch_status(
            session,
            job,
            JobStatus.CANCELLING,
            reason=Reason.CANCELLED_BY_USER,
            message="its worker is told to stop",
        )
    if waiting or (status is JobStatus.EXPORTING and not running):
        await end_cancelled(session, job)
    return job


async def pause(session: AsyncSession, team: str | None, job_id: str) -> JobRow:
    """Set a job aside: at once while it waits, at its next step with a checkpoint while it runs.

    Raises:
        NotFound: There is no such job.
        JobNotPausable: Its training is over, or it is about to end.
    """
    job = await _locked(session, team, job_id)
    status = JobStatus(job.status)
    if status is JobStatus.PAUSED:
        return job
    if status is JobStatus.PAUSING:
        if job.reason != Reason.PAUSED_BY_USER:  # it was about to yield: it stays away now
            await tell_again(session, job, Reason.PAUSED_BY_USER, PAUSES_AT_STEP)
        return job
    if status is JobStatus.QUEUED:
        await pause_waiting(session, job)
    elif status in (JobStatus.PREPARING, JobStatus.TRAINING):
        await switch_status(
            session,
            job,
            JobStatus.PAUSING,
            reason=Reason.PAUSED_BY_USER,
            message=PAUSES_AT_STEP,
        )
    else:
        raise JobNotPausable(f"the job is {status}; only one that waits or trains can be paused")
    return job


async def retry(
    session: AsyncSession,
    wakes: PendingWakes,
    policy: AdmissionPolicy,
    team: str | None,
    job_id: str,
    role: Role,
) -> JobRow:
    """A new job from the specification of one that failed or was cancelled.

    Raises:
        NotFound: There is no such job.
        JobNotRetryable: It has not ended, or it succeeded.
        JobInvalid: Its specification is not allowed any longer.
    """
    job = await _locked(session, team, job_id)
    if JobStatus(job.status) not in (JobStatus.FAILED, JobStatus.CANCELLED):
        raise JobNotRetryable(f"the job is {job.status}; only a failed or cancelled one is retried")
    again, _ = await submit(
        session,
        wakes,
        policy,
        team=job.team,
        requested=JobSpec.model_validate(job.spec),
        idempotency_key=None,
        role=role,
    )
    return again


async def delete(session: AsyncSession, team: str | None, job_id: str) -> None:
    """Remove an ended job with its history; files go soon, unless another job has the same.

    Raises:
        NotFound: There is no such job.
        JobNotEnded: It has not ended.
    """
    job = await _locked(session, team, job_id)
    if JobStatus(job.status) not in (*TERMINAL, JobStatus.PAUSED):
        raise JobNotEnded(f"the job is {job.status}; cancel it first")
    files = {artifact.sha256 for artifact in await artifacts.artifacts_of(session, [job.id])}
    await close_all(session, job.id, AttemptOutcome.CANCELLED)  # a question may be running
    await session.delete(job)
    await blobs.mark_unreferenced(session, files)


async def resume(
    session: AsyncSession, wakes: PendingWakes, team: str | None, job_id: str
) -> JobRow:
    """Put a paused job back into the queue; it continues from its newest checkpoint.

    Raises:
        NotFound: There is no such job.
        JobNotPaused: It is not paused.
    """
    job = await _locked(session, team, job_id)
    if JobStatus(job.status) is not JobStatus.PAUSED:
        raise JobNotPaused(f"the job is {job.status}; only a paused job can be resumed")
    await switch_status(session, job, JobStatus.QUEUED, message="resumed on request")
    wakes.training()
    return job


def preflight_of(requested: JobSpec) -> JobSpec:
    """The specification of a job that ends after its pre-flight."""
    only = {"only": True, "cases": requested.preflight.cases or PreflightSpec().cases}
    changed = {"preflight": requested.preflight.model_copy(update=only), "exports": ()}
    return requested.model_copy(update=changed)


def hash_of(requested: Spec) -> str:
    """Equal for equal requests: the order in which an object's keys were sent means nothing."""
    text = json.dumps(requested.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _same_request(job: JobRow, request_hash: str) -> JobRow:
    if job.request_hash != request_hash:
        raise IdempotencyKeyReused(
            f"this Idempotency-Key created job {job.id} from another body; use a new key"
        )
    return job


async def _locked(session: AsyncSession, team: str | None, job_id: str) -> JobRow:
    job = await lock_job(session, job_id)
    if job is None or team not in (None, job.team):
        raise NotFound(f"there is no job {job_id!r}")
    return job
