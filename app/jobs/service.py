"""What happens to jobs on request: submit, cancel, pause, resume, retry, delete."""

import hashlib
from dataclasses import dataclass

from pydantic import TypeAdapter
from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import objects
from app.db.base import new_id
from app.db.models import ExportRow, JobRow, SuiteRow
from app.exceptions import (
    IdempotencyKeyReused,
    JobFinished,
    JobInvalid,
    JobNotEnded,
    JobNotPausable,
    JobNotPaused,
    JobNotRetryable,
    NotFound,
)
from app.jobs import checks, repository
from app.jobs.export_checks import export_problems, require_trained
from app.jobs.lifecycle import (
    EventDraft,
    append_events,
    end_cancelled,
    lock_job,
    pause_waiting,
    switch_status,
)
from app.jobs.rules import OperatorRules
from app.queue.doorbell import Doorbell
from app.queue.exports import cancel_exports
from app.suites import repository as suites
from app.teams import quotas
from dressage.spec.effective import effective_spec
from dressage.spec.event import EventType
from dressage.spec.export import ExportSpec, export_name
from dressage.spec.job import Adjustment, JobSpec
from dressage.spec.preflight import PreflightSpec
from dressage.spec.status import TERMINAL, ExportStatus, JobStatus, Reason

PRIORITIES = {"urgent": 0, "high": 1, "normal": 2, "low": 3}


@dataclass(frozen=True)
class Prepared:
    """A specification that passed every check, and the suite it runs on."""

    spec: JobSpec
    adjustments: tuple[Adjustment, ...]
    suite: SuiteRow


async def prepare(
    session: AsyncSession, team: str, requested: JobSpec, rules: OperatorRules
) -> Prepared:
    """Check all that can be known before a GPU is used.

    Raises:
        JobInvalid: With every problem found, by field.
    """
    suite = await suites.find(session, team, requested.suite)
    if suite is None:
        raise checks.missing_suite(requested.suite)
    spec, adjustments = effective_spec(requested, suite=f"{suite.name}@{suite.version}")
    problems = [
        *checks.unknown_names(spec, suite),
        *checks.too_few_cases(spec, suite.case_count),
        *checks.echo_problems(spec, suite),
        *checks.bad_schemas(spec.rewards),
        *checks.needs_gpu(spec),
        *rules.problems(spec),
        *await export_problems(session, rules, spec, trained=False),
    ]
    if problems:
        raise JobInvalid.of(problems)
    return Prepared(spec, adjustments, suite)


async def submit(
    session: AsyncSession,
    doorbell: Doorbell,
    rules: OperatorRules,
    *,
    team: str,
    requested: JobSpec,
    idempotency_key: str | None,
) -> tuple[JobRow, bool]:
    """Store a job and ring. Returns it, and whether it is new.

    Raises:
        JobInvalid: It cannot run.
        IdempotencyKeyReused: The key came with another body before.
    """
    request_hash = hashlib.sha256(requested.model_dump_json().encode()).hexdigest()
    if idempotency_key:
        known = await repository.by_idempotency_key(session, team, idempotency_key)
        if known:
            return _same_request(known, request_hash), False
    prepared = await prepare(session, team, requested, rules)
    if not await suites.hold(session, prepared.suite.id):
        raise checks.missing_suite(requested.suite)
    await quotas.require_room(session, team)
    spec = prepared.spec
    job = JobRow(
        id=new_id("job"),
        team=team,
        name=spec.name,
        status=JobStatus.QUEUED,
        suite_id=prepared.suite.id,
        spec=spec.model_dump(mode="json"),
        adjustments=[adjustment.model_dump(mode="json") for adjustment in prepared.adjustments],
        priority=PRIORITIES[spec.priority],
        gpus=spec.resources.gpus,
        workload=f"{spec.agent.model} on {prepared.suite.name}",
        steps=spec.planned_steps(prepared.suite.case_count),
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
    session.add_all(
        ExportRow(
            id=new_id("export"),
            job_id=job.id,
            name=export_name(export),
            spec=export.model_dump(mode="json"),
            status=ExportStatus.QUEUED,
        )
        for export in spec.exports
    )
    drafts = [EventDraft(EventType.STATUS, {"status": JobStatus.QUEUED})]
    drafts += [
        EventDraft(EventType.ADJUSTMENT, adjustment.model_dump(mode="json"))
        for adjustment in prepared.adjustments
    ]
    await append_events(session, job.id, drafts)
    doorbell.training()
    return job, True


async def export_again(
    session: AsyncSession,
    doorbell: Doorbell,
    rules: OperatorRules,
    team: str | None,
    job_id: str,
    wanted: ExportSpec,
) -> tuple[ExportRow, bool]:
    """Queue a follow-up task on a trained job. Returns it, and whether it is (queued) anew.

    One that waits, runs or has succeeded is what was asked for; one that failed is tried again, and
    one that is wanted with other options is made again.

    Raises:
        NotFound: There is no such job.
        JobNotTrained: It has no trained model (yet).
        QuotaExceeded: The team's files are too big already.
        JobInvalid: The export cannot be made.
    """
    job = await _locked(session, team, job_id)
    spec = JobSpec.model_validate(job.spec)
    await require_trained(session, job, wanted.checkpoint)
    await quotas.require_storage(session, job.team)
    asked = spec.model_copy(update={"exports": (wanted,)})
    problems = await export_problems(session, rules, asked, trained=True)
    if problems:
        raise JobInvalid.of(problems)
    name = export_name(wanted)
    row = await repository.export_named(session, job.id, name)
    if row and not _asked_anew(row, wanted):
        return row, False
    if row is None:
        row = ExportRow(id=new_id("export"), job_id=job.id, name=name, spec={}, status="")
        session.add(row)
    row.spec, row.status = wanted.model_dump(mode="json"), ExportStatus.QUEUED
    row.attempts, row.reason, row.message, row.finished_at = 0, None, None, None
    row.not_before = None
    await session.flush()
    await session.refresh(row)
    data = {"export": name, "status": ExportStatus.QUEUED}
    await append_events(session, job.id, [EventDraft(EventType.EXPORT, data)])
    doorbell.exports()
    return row, True


def _asked_anew(row: ExportRow, wanted: ExportSpec) -> bool:
    """Whether an export has to be made (again): it failed, or is wanted in another way."""
    if row.status in (ExportStatus.FAILED, ExportStatus.CANCELLED):
        return True
    done: ExportSpec = TypeAdapter(ExportSpec).validate_python(row.spec)
    return row.status == ExportStatus.SUCCEEDED and done != wanted


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
    if status in (JobStatus.PAUSING, JobStatus.PAUSED):
        job.reason = Reason.PAUSED_BY_USER  # also one that was about to yield: it stays away now
        return job
    if status is JobStatus.QUEUED:
        await pause_waiting(session, job)
    elif status in (JobStatus.PREPARING, JobStatus.TRAINING):
        await switch_status(
            session,
            job,
            JobStatus.PAUSING,
            reason=Reason.PAUSED_BY_USER,
            message="it stops after its current step, with a checkpoint",
        )
    else:
        raise JobNotPausable(f"the job is {status}; only one that waits or trains can be paused")
    return job


async def retry(
    session: AsyncSession, doorbell: Doorbell, rules: OperatorRules, team: str | None, job_id: str
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
        doorbell,
        rules,
        team=job.team,
        requested=JobSpec.model_validate(job.spec),
        idempotency_key=None,
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
    files = {artifact.sha256 for artifact in await repository.artifacts_of(session, [job.id])}
    await session.delete(job)
    await objects.let_go(session, files)


async def _locked(session: AsyncSession, team: str | None, job_id: str) -> JobRow:
    job = await lock_job(session, job_id)
    if job is None or team not in (None, job.team):
        raise NotFound(f"there is no job {job_id!r}")
    return job


async def resume(
    session: AsyncSession, doorbell: Doorbell, team: str | None, job_id: str
) -> JobRow:
    """Put a paused job back into the queue; it goes on from its newest checkpoint.

    Raises:
        NotFound: There is no such job.
        JobNotPaused: It is not paused.
    """
    job = await _locked(session, team, job_id)
    if JobStatus(job.status) is not JobStatus.PAUSED:
        raise JobNotPaused(f"the job is {job.status}; only a paused job can be resumed")
    await switch_status(session, job, JobStatus.QUEUED, message="resumed on request")
    doorbell.training()
    return job


def preflight_of(requested: JobSpec) -> JobSpec:
    """The specification of a job that ends after its pre-flight."""
    only = {"only": True, "cases": requested.preflight.cases or PreflightSpec().cases}
    changed = {"preflight": requested.preflight.model_copy(update=only), "exports": ()}
    return requested.model_copy(update=changed)


def _same_request(job: JobRow, request_hash: str) -> JobRow:
    if job.request_hash != request_hash:
        raise IdempotencyKeyReused(
            f"this Idempotency-Key created job {job.id} from another body; use a new key"
        )
    return job
