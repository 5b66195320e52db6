"""One export on this worker: claim → spawn → relay → settle. The trained files are only read."""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy.exc import OperationalError

from app.artifacts import repository as artifacts
from app.db.engine import Sessions, create_engine, create_sessions, unit_of_work
from app.db.models import ArtifactRow, JobRow, SuiteRow
from app.jobs.lifecycle import EventDraft, append_events
from app.queue.claim import StaleLease
from app.queue.exports import (
    ExportLease,
    claim_export,
    fenced_export,
    heartbeat_export,
    release_export,
    settle_export,
)
from app.suites.service import load
from dressage.authoring.suite import Suite
from dressage.spec.artifact import ArtifactKind
from dressage.spec.job import JobSpec
from dressage.spec.status import ExportStatus, JobStatus, Reason
from worker.supervisor.context import WorkerContext
from worker.supervisor.files import register_files, store_files
from worker.supervisor.outcome import Outcome, outcome_of, read_outcome
from worker.supervisor.process import ChildProcess
from worker.supervisor.relay import EventTail
from worker.supervisor.watch import Ending, watch
from worker.training.export.spec import ExportRunSpec
from worker.training.run_dir import INPUT, SPEC, SUITE

log = structlog.get_logger()

TRAINED = (ArtifactKind.ADAPTER, ArtifactKind.MODEL)
PROMPT_TOKENS = 2048  # room for instructions, tools and input beside the completion


async def run_next_export(context: WorkerContext) -> bool:
    """Claim and run one export. False when there is none."""
    engine = create_engine(context.database_url, pooled=False)
    sessions = create_sessions(engine)
    async with unit_of_work(sessions) as session:
        lease = await claim_export(session, lease_seconds=context.lease_seconds)
        if lease is None:
            return False
        job = await session.get_one(JobRow, lease.job_id)
        suite = await session.get_one(SuiteRow, job.suite_id)
        trained = await artifacts.of_kind(session, job.id, TRAINED)
    assert trained is not None  # a job reaches `exporting` with its trained files stored
    with structlog.contextvars.bound_contextvars(job_id=lease.job_id, export=lease.name):
        log.info("export.claimed", attempt=lease.attempt)
        run = context.runs_dir / lease.job_id / f"{lease.name}-attempt-{lease.attempt}"
        with contextlib.suppress(StaleLease):  # somebody else's by now: nothing may be written
            try:
                await asyncio.to_thread(_prepare, context, lease, run, job, suite, trained)
                await _run(context, sessions, lease, run)
            except (StaleLease, OperationalError):
                raise
            except Exception as error:
                log.exception("export.not_settled")
                await _settle(context, sessions, lease, run, outcome_of(error))
    return True


def _prepare(
    context: WorkerContext,
    lease: ExportLease,
    run: Path,
    job: JobRow,
    suite: SuiteRow,
    trained: ArtifactRow,
) -> None:
    run.mkdir(parents=True)
    job_spec = JobSpec.model_validate(job.spec)
    spec = _export_spec(
        lease,
        job_spec,
        load(context.storage, suite),
        job_spec.agent.tool_schemas(suite.tools, suite.environments),
        ArtifactKind(trained.kind),
    )
    (run / SPEC).write_text(spec.model_dump_json(indent=1))
    shutil.copyfile(context.storage.path(trained.sha256), run / INPUT)
    shutil.copyfile(context.storage.path(suite.storage_key), run / SUITE)


def _export_spec(
    lease: ExportLease, job: JobSpec, suite: Suite, tools: list[dict[str, Any]], kind: ArtifactKind
) -> ExportRunSpec:
    return ExportRunSpec.model_validate(
        {
            "export": {**lease.spec, "job": job} if "request" in lease.spec else lease.spec,
            "base_model": job.agent.model,
            "trained": kind,
            "messages": suite.cases[0].conversation(job.agent.instructions),
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "context_length": PROMPT_TOKENS + job.training.max_completion_length,
        }
    )


async def _run(context: WorkerContext, sessions: Sessions, lease: ExportLease, run: Path) -> None:
    child = await ChildProcess.start(context.export_module, run)
    tail = EventTail(run)

    async def keep_lease() -> JobStatus:
        async with unit_of_work(sessions) as session:
            return await heartbeat_export(session, lease, context.lease_seconds)

    async def relay() -> bool:
        drafts = [
            EventDraft(draft.type, {**draft.data, "export": lease.name}, draft.time)
            for draft in tail.read()
        ]
        if drafts:
            async with unit_of_work(sessions) as session:
                job, _ = await fenced_export(session, lease)
                await append_events(session, job.id, drafts)
        tail.advance()
        return bool(drafts)

    ending = await watch(context, child, heartbeat=keep_lease, relay=relay)
    log.info("child.ended", ending=ending, returncode=child.returncode)
    if ending is Ending.STOPPING:
        async with unit_of_work(sessions) as session:
            await release_export(session, lease)
    elif ending is Ending.CANCELLED:
        async with unit_of_work(sessions) as session:
            await settle_export(
                session, lease, ExportStatus.CANCELLED, reason=Reason.CANCELLED_BY_USER
            )
    elif ending is Ending.EXITED:
        await _settle(context, sessions, lease, run, read_outcome(run, child.returncode))
    if ending is not Ending.STALE:
        await asyncio.to_thread(shutil.rmtree, run, ignore_errors=True)


async def _settle(
    context: WorkerContext, sessions: Sessions, lease: ExportLease, run: Path, outcome: Outcome
) -> None:
    if outcome.manifest is None:
        async with unit_of_work(sessions) as session:
            await settle_export(
                session,
                lease,
                ExportStatus.FAILED,
                reason=outcome.reason,
                message=outcome.message,
            )
        return
    await asyncio.to_thread(store_files, context.storage, run, outcome.manifest)
    async with unit_of_work(sessions) as session:
        job, _ = await fenced_export(session, lease)
        await register_files(session, job.id, outcome.manifest)
        await settle_export(
            session,
            lease,
            ExportStatus.SUCCEEDED,
            reason=Reason.COMPLETED,
            result=outcome.manifest.result,
        )
