"""One job on this worker: claim → spawn → relay → settle."""

import asyncio
import contextlib
import shutil
from pathlib import Path

import structlog
from sqlalchemy.exc import OperationalError

from app.db.engine import Sessions, create_engine, create_sessions, unit_of_work
from app.db.models import JobRow, SuiteRow
from app.jobs.lifecycle import EventDraft, append_events, end_cancelled, switch_status
from app.queue.claim import Lease, StaleLease, claim, end_attempt, fenced, heartbeat, release
from app.queue.exports import cancel_exports, finish_job
from dressage.spec.event import EventType
from dressage.spec.job import JobSpec
from dressage.spec.status import JobStatus, Reason
from worker.supervisor.context import WorkerContext
from worker.supervisor.files import register_files, store_files
from worker.supervisor.outcome import Outcome, last_lines, outcome_of, read_outcome
from worker.supervisor.process import ChildProcess
from worker.supervisor.relay import EventTail
from worker.supervisor.store_events import store_events
from worker.supervisor.watch import Ending, watch
from worker.training.run_dir import PAUSE, SPEC, SUITE, RunSpec

log = structlog.get_logger()

LAST_LINES = 30
PAUSES = (Reason.PAUSED_BY_USER, Reason.NO_LEARNING_SIGNAL)


async def run_next_job(context: WorkerContext) -> bool:
    """Claim and run one job. False when there is none."""
    engine = create_engine(context.database_url, pooled=False)
    sessions = create_sessions(engine)
    async with unit_of_work(sessions) as session:
        lease = await claim(
            session,
            worker_id=context.worker_id,
            gpus=context.gpus,
            lease_seconds=context.lease_seconds,
        )
        if lease is None:
            return False
        job = await session.get_one(JobRow, lease.job_id)
        suite = await session.get_one(SuiteRow, job.suite_id)
    with structlog.contextvars.bound_contextvars(job_id=lease.job_id, attempt=lease.attempt):
        log.info("job.claimed")
        run = context.runs_dir / lease.job_id / f"attempt-{lease.attempt}"
        with contextlib.suppress(StaleLease):  # somebody else's by now: nothing may be written
            try:
                _prepare(context, lease, run, JobSpec.model_validate(job.spec), suite)
                await _run(context, sessions, lease, run)
            except (StaleLease, OperationalError):
                raise
            except Exception as error:
                log.exception("job.not_settled")
                await _fail(sessions, lease, run, outcome_of(error))
    return True


def _prepare(
    context: WorkerContext, lease: Lease, run: Path, spec: JobSpec, suite: SuiteRow
) -> None:
    """Lay out the run directory. Each attempt has its own: two can never write to one."""
    earlier = [run.with_name(f"attempt-{number}") for number in range(1, lease.attempt)]
    run.mkdir(parents=True)
    run_spec = RunSpec(job=spec, previous=tuple(str(path) for path in earlier if path.is_dir()))
    (run / SPEC).write_text(run_spec.model_dump_json(indent=1))
    shutil.copyfile(context.storage.path(suite.storage_key), run / SUITE)


async def _run(context: WorkerContext, sessions: Sessions, lease: Lease, run: Path) -> None:
    child = await ChildProcess.start(context.training_module, run)
    tail = EventTail(run)

    async def keep_lease() -> JobStatus:
        async with unit_of_work(sessions) as session:
            return await heartbeat(session, lease, context.lease_seconds)

    async def relay() -> bool:
        drafts = tail.read()
        if drafts:
            async with unit_of_work(sessions) as session:
                await store_events(session, await fenced(session, lease), drafts)
        tail.advance()
        return bool(drafts)

    ending = await watch(
        context, child, heartbeat=keep_lease, relay=relay, pause=(run / PAUSE).touch
    )
    log.info("child.ended", ending=ending, returncode=child.returncode)
    if ending is Ending.STOPPING:
        async with unit_of_work(sessions) as session:
            await release(session, lease, "its worker was stopped; queued again")
    elif ending is Ending.CANCELLED:
        await relay()
        async with unit_of_work(sessions) as session:
            job = await fenced(session, lease)
            await end_attempt(session, lease, "cancelled")
            await end_cancelled(session, job)
    elif ending is Ending.EXITED:
        await _settle(context, sessions, lease, run, read_outcome(run, child.returncode))


async def _settle(
    context: WorkerContext, sessions: Sessions, lease: Lease, run: Path, outcome: Outcome
) -> None:
    if outcome.manifest is None:
        await _fail(sessions, lease, run, outcome)
        return
    await asyncio.to_thread(store_files, context.storage, run, outcome.manifest)
    async with unit_of_work(sessions) as session:
        job = await fenced(session, lease)
        await register_files(session, job.id, outcome.manifest)
        job.result = outcome.manifest.result
        await end_attempt(session, lease, "succeeded")
        if job.status == JobStatus.CANCELLING:  # asked for while the last file was stored
            await end_cancelled(session, job)
            return
        await switch_status(session, job, JobStatus.EXPORTING)
        await finish_job(session, job)  # at once, when there is nothing to export


async def _fail(sessions: Sessions, lease: Lease, run: Path, outcome: Outcome) -> None:
    async with unit_of_work(sessions) as session:
        job = await fenced(session, lease)
        data = {"level": "error", "message": f"last output:\n{last_lines(run, LAST_LINES)}"}
        await append_events(session, job.id, [EventDraft(EventType.LOG, data)])
        await end_attempt(session, lease, "failed")
        if job.status == JobStatus.CANCELLING:
            await end_cancelled(session, job)
            return
        if outcome.reason in PAUSES:
            await switch_status(
                session, job, JobStatus.PAUSED, reason=outcome.reason, message=outcome.message
            )
            return
        await switch_status(
            session, job, JobStatus.FAILED, reason=outcome.reason, message=outcome.message
        )
        await cancel_exports(session, job.id)
