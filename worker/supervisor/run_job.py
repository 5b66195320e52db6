"""One job on this worker: claim → spawn → relay → settle."""

import contextlib
import time
from collections.abc import Sequence
from functools import partial

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import DATABASE_AWAY, Sessions, create_engine, create_sessions, unit_of_work
from app.db.models import AttemptRow, JobRow, SuiteRow
from app.jobs.lifecycle import EventDraft, append_events, end_cancelled, switch_status
from app.queue.claim import (
    Claim,
    Lease,
    StaleLease,
    claim,
    end_attempt,
    end_lost,
    fenced,
    heartbeat,
    put_back,
    release,
)
from app.queue.exports import cancel_exports, finish_job
from app.queue.retries import ACCIDENTS, halve_micro_batch
from app.queue.retries import Outcome as AttemptOutcome
from app.workers.repository import note_gpu_failure
from dressage.spec.event import EventType
from dressage.spec.job import JobSpec
from dressage.spec.status import JobStatus, Reason
from worker.supervisor.context import WorkerContext
from worker.supervisor.files import register_files, store_files
from worker.supervisor.outcome import Outcome, last_lines, outcome_of, read_outcome
from worker.supervisor.process import ChildProcess
from worker.supervisor.relay import has_more, read_events
from worker.supervisor.stacks import dump_stacks
from worker.supervisor.store_events import store_events
from worker.supervisor.watch import Ending, patiently, until_stored, watch
from worker.training.checkpoints import kept, newest_complete, step_of
from worker.training.run_dir import PAUSE, SPEC, SUITE, ProducedFile, RunSpec

log = structlog.get_logger()

LAST_LINES = 30
PAUSES = (Reason.PAUSED_BY_USER, Reason.NO_LEARNING_SIGNAL)
NO_PROGRESS = (EventType.LOG, EventType.WARNING)  # a loop that complains does not get on


async def run_next_job(context: WorkerContext) -> Claim:
    """Claim and run one job. Without a lease there was none; `others` should look then."""
    engine = create_engine(context.database_url, pooled=False)
    sessions = create_sessions(engine)
    try:
        async with unit_of_work(sessions) as session:
            found = await claim(session, context.worker_id)
            if found.lease is None:
                return found
            job = await session.get_one(JobRow, found.lease.job_id)
            suite = await session.get_one(SuiteRow, job.suite_id)
    except DATABASE_AWAY as error:
        log.warning("claim.database", error=str(error).splitlines()[:1])
        return Claim()
    lease = found.lease
    with structlog.contextvars.bound_contextvars(job_id=lease.job_id, attempt=lease.attempt):
        log.info("job.claimed")
        work = JobRun(context, sessions, lease)
        with contextlib.suppress(StaleLease):  # somebody else's by now: nothing may be written
            try:
                spec = JobSpec.model_validate(job.spec)
                await patiently(context, work, lambda: work.prepare(spec, suite))
                await until_stored(work.recover)
                await work.run()
            except StaleLease:
                raise
            except Exception as error:
                log.exception("job.not_settled")
                await work.fail(outcome_of(error))
    return found


class JobRun:
    """One attempt, from its directory to its end."""

    def __init__(self, context: WorkerContext, sessions: Sessions, lease: Lease) -> None:
        self._context, self._sessions, self._lease = context, sessions, lease
        self._run = context.runs_dir / lease.job_id / f"attempt-{lease.attempt}"
        self._relayed = 0
        self._progress_at = time.monotonic()

    def prepare(self, spec: JobSpec, suite: SuiteRow) -> None:
        """Lay out the run directory. Each attempt has its own: two can never write to one."""
        earlier = [
            self._run.with_name(f"attempt-{number}") for number in range(1, self._lease.attempt)
        ]
        self._run.mkdir(parents=True, exist_ok=True)  # a second time when the store was away
        earlier = [path for path in earlier if path.is_dir()]
        # Chosen before `recover` reads their history, so all of it up to here is found there.
        checkpoint = newest_complete(earlier)
        run_spec = RunSpec(
            job=spec,
            previous=tuple(str(path) for path in earlier),
            up_to_step=step_of(checkpoint) if checkpoint else 0,
        )
        (self._run / SPEC).write_text(run_spec.model_dump_json(indent=1))
        self._context.storage.fetch(suite.storage_key, self._run / SUITE)

    async def recover(self) -> None:
        """Store what earlier attempts wrote and their worker could not store any longer.

        This one goes on after their newest checkpoint, so nobody would write it again.
        """
        async with unit_of_work(self._sessions) as session:
            job, _ = await fenced(session, self._lease)
            earlier = await session.scalars(
                select(AttemptRow)
                .where(AttemptRow.job_id == job.id, AttemptRow.ended_at.is_not(None))
                .order_by(AttemptRow.number)
            )
            for attempt in earlier:
                run = self._run.with_name(f"attempt-{attempt.number}")
                while has_more(run, attempt.relayed):
                    drafts, position = read_events(run, attempt.relayed)
                    if position == attempt.relayed:
                        break  # the beginning of a line, cut off
                    attempt.relayed = position
                    told = [draft for draft in drafts if draft.type is not EventType.STATUS]
                    await store_events(session, job, told)

    async def run(self) -> None:
        """Start the child, watch it, store what came of it."""
        child = await ChildProcess.start(
            self._context.training_module, self._run, gpu_indexes=self._lease.gpu_indexes
        )
        try:
            ending = await watch(self._context, child, self)
            log.info("child.ended", ending=ending, returncode=child.returncode)
            if ending in (Ending.EXITED, Ending.CANCELLED):
                await self._keep_checkpoints()
            if ending is Ending.STALLED:
                await self._stalled(child)
            elif ending is Ending.STOPPING:
                await until_stored(self._release)
            elif ending is Ending.CANCELLED:
                await until_stored(self._cancelled)
            elif ending is Ending.EXITED:
                await self._settle(read_outcome(self._run, child.returncode))
        finally:
            await child.kill()  # whatever went wrong here, no child outlives its supervisor

    async def heartbeat(self) -> JobStatus:
        """Keep the lease; the job's status."""
        async with unit_of_work(self._sessions) as session:
            return await heartbeat(session, self._lease)

    async def relay(self) -> bool:
        """Store the next batch of events; whether there was one."""
        if not has_more(self._run, self._relayed):
            return False
        async with unit_of_work(self._sessions) as session:
            job, attempt = await fenced(session, self._lease)
            drafts, attempt.relayed = read_events(self._run, attempt.relayed)
            await store_events(session, job, drafts)
        self._relayed = attempt.relayed
        if any(draft.type not in NO_PROGRESS for draft in drafts):
            self._progress_at = time.monotonic()
        return bool(drafts)

    def pause(self) -> None:
        """Tell the child to stop at its next step."""
        (self._run / PAUSE).touch()

    def has_stalled(self) -> bool:
        """Whether the child has said nothing of progress for too long."""
        return time.monotonic() - self._progress_at > self._context.stall_seconds

    async def fail(self, outcome: Outcome) -> None:
        """Store that the attempt came to nothing, and what follows from the reason."""
        await until_stored(lambda: self._failed(outcome))

    async def _keep_checkpoints(self) -> None:
        """Store what this and earlier attempts have kept, however they ended.

        What hinders it is said in the job, and does not change how it ended.
        """
        runs = [
            self._run.with_name(f"attempt-{number}") for number in range(1, self._lease.attempt + 1)
        ]
        for run in runs:
            files = kept(run)
            if not files:
                continue
            problem = None
            try:
                await store_files(self._context, self._sessions, self, run, files)
            except OSError as error:
                problem = f"checkpoints were not stored: {error}"
                files = ()
            await until_stored(partial(self._register, files, problem))

    async def _register(self, files: Sequence[ProducedFile], problem: str | None) -> None:
        async with unit_of_work(self._sessions) as session:
            job, _ = await fenced(session, self._lease)
            await register_files(session, job.id, files)
            if problem:
                data = {"code": "checkpoints_not_stored", "message": problem}
                await append_events(session, job.id, [EventDraft(EventType.WARNING, data)])

    async def _settle(self, outcome: Outcome) -> None:
        manifest = outcome.manifest
        if manifest is None:
            await self.fail(outcome)
            return
        await store_files(self._context, self._sessions, self, self._run, manifest.files)

        async def store() -> None:
            async with unit_of_work(self._sessions) as session:
                job, _ = await fenced(session, self._lease)
                await register_files(session, job.id, manifest.files)
                job.result = manifest.result
                await end_attempt(session, job, AttemptOutcome.SUCCEEDED)
                if job.status == JobStatus.CANCELLING:  # asked for while the last file was stored
                    await end_cancelled(session, job)
                    return
                await switch_status(session, job, JobStatus.EXPORTING)
                await finish_job(session, job)  # at once, when there is nothing to export

        await until_stored(store)

    async def _release(self) -> None:
        async with unit_of_work(self._sessions) as session:
            await release(session, self._lease, "its worker was stopped; queued again")

    async def _cancelled(self) -> None:
        while await self.relay():
            pass
        async with unit_of_work(self._sessions) as session:
            job, _ = await fenced(session, self._lease)
            await end_attempt(session, job, AttemptOutcome.CANCELLED)
            await end_cancelled(session, job)

    async def _stalled(self, child: ChildProcess) -> None:
        stacks = await dump_stacks(self._run)
        await child.kill()
        await self._keep_checkpoints()
        seconds = self._context.stall_seconds
        message = f"no progress for {seconds:g} s"

        async def store() -> None:
            async with unit_of_work(self._sessions) as session:
                job, _ = await fenced(session, self._lease)
                data = {"message": message, "stacks": stacks}
                await append_events(session, job.id, [EventDraft(EventType.STALLED, data)])
                await self._accident(session, job, Reason.STALLED, message)

        await until_stored(store)

    async def _failed(self, outcome: Outcome) -> None:
        async with unit_of_work(self._sessions) as session:
            job, _ = await fenced(session, self._lease)
            message = outcome.message
            if outcome.reason is Reason.PAUSED_BY_USER and job.reason == Reason.PREEMPTED:
                await put_back(session, job, "yielded to a job of a higher class; queued again")
                return
            last = f"last output:\n{last_lines(self._run, LAST_LINES)}"
            data = {"level": "error", "message": last}
            await append_events(session, job.id, [EventDraft(EventType.LOG, data)])
            if outcome.reason in ACCIDENTS:
                await self._accident(session, job, outcome.reason, message)
                return
            status = JobStatus(job.status)
            full = outcome.reason is Reason.OUT_OF_MEMORY
            await end_attempt(session, job, _ended_as(outcome.reason))
            if status is JobStatus.CANCELLING:
                await end_cancelled(session, job)
            elif outcome.reason in PAUSES:
                await switch_status(
                    session, job, JobStatus.PAUSED, reason=outcome.reason, message=message
                )
            elif not (full and await halve_micro_batch(session, job, message)):
                await switch_status(
                    session, job, JobStatus.FAILED, reason=outcome.reason, message=message
                )
                await cancel_exports(session, job.id)

    async def _accident(
        self, session: AsyncSession, job: JobRow, reason: Reason, message: str
    ) -> None:
        policy = self._context.retry_policy
        await end_lost(session, job, policy, ACCIDENTS[reason], reason, message)
        if job.status == JobStatus.FAILED:
            await cancel_exports(session, job.id)
        if reason is Reason.GPU_FAILED:
            await note_gpu_failure(session, self._context.worker_id, message)


def _ended_as(reason: Reason) -> AttemptOutcome:
    if reason is Reason.OUT_OF_MEMORY:
        return AttemptOutcome.OUT_OF_MEMORY
    return AttemptOutcome.PAUSED if reason in PAUSES else AttemptOutcome.FAILED
