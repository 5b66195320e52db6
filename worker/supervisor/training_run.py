"""One job's training on this worker."""

import time
from collections.abc import Sequence
from functools import partial

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import Sessions, unit_of_work
from app.db.models import AttemptRow, JobRow, SuiteRow
from app.exports.leases import cancel_exports, finish_job
from app.lifecycle.jobs import EventDraft, append_events, end_cancelled, switch_status
from app.scheduling.leases import (
    Claim,
    Lease,
    claim,
    end_attempt,
    end_lost,
    fenced,
    release,
    requeue,
)
from app.scheduling.retries import RETRYABLE, halve_micro_batch
from app.workers.repository import note_gpu_failure
from dressage.spec.event import EventType
from dressage.spec.job import JobSpec
from dressage.spec.status import AttemptOutcome, JobStatus, Reason
from worker.supervisor.context import WorkerContext
from worker.supervisor.files import register_files, store_files
from worker.supervisor.leased_run import LeasedRun, claimed
from worker.supervisor.outcome import Outcome, last_lines
from worker.supervisor.process import ChildProcess
from worker.supervisor.relay import has_more, read_events
from worker.supervisor.stacks import dump_stacks
from worker.supervisor.store_events import store_events
from worker.supervisor.watch import until_stored
from worker.wire.checkpoints import kept, newest_complete, step_of
from worker.wire.run_dir import PAUSE, SPEC, SUITE, ProducedFile, RunSpec

LAST_LINES = 30
LAST_EVENTS_SECONDS = 5.0  # of a job that nobody wants any longer
PAUSES = (Reason.PAUSED_BY_USER, Reason.NO_LEARNING_SIGNAL)
NO_PROGRESS = (EventType.LOG, EventType.WARNING)  # a loop that complains does not get on

Found = tuple[Claim, JobRow | None, SuiteRow | None]


async def run_next_job(context: WorkerContext) -> Claim:
    """Claim and run one job. Without a lease no job was for us; `others` should look then."""

    async def take(session: AsyncSession) -> Found:
        found = await claim(session, context.worker_id)
        if found.lease is None:
            return found, None, None
        job = await session.get_one(JobRow, found.lease.job_id)
        return found, job, await session.get_one(SuiteRow, job.suite_id)

    sessions, taken = await claimed(context, take)
    found, job, suite = taken or (Claim(), None, None)
    if found.lease and job and suite:
        await TrainingRun(context, sessions, found.lease, job, suite).carry_out()
    return found


class TrainingRun(LeasedRun):
    """One attempt at a job."""

    def __init__(
        self,
        context: WorkerContext,
        sessions: Sessions,
        lease: Lease,
        job: JobRow,
        suite: SuiteRow,
    ) -> None:
        super().__init__(context, sessions, lease)
        self._job, self._suite = job, suite
        self.module = context.training_module
        self.path = context.runs_dir / lease.job_id / f"attempt-{lease.attempt}"
        self._progress_at = time.monotonic()

    def lay_out(self) -> None:
        """Write the specification and the suite. Each attempt has its own directory."""
        earlier = [
            self.path.with_name(f"attempt-{number}") for number in range(1, self.lease.attempt)
        ]
        self.path.mkdir(parents=True, exist_ok=True)
        earlier = [path for path in earlier if path.is_dir()]
        # Chosen before `recover` reads their history, so all of it up to here is found there.
        checkpoint = newest_complete(earlier)
        run_spec = RunSpec(
            job=JobSpec.model_validate(self._job.spec),
            previous=tuple(str(path) for path in earlier),
            up_to_step=step_of(checkpoint) if checkpoint else 0,
        )
        (self.path / SPEC).write_text(run_spec.model_dump_json(indent=1))
        self.context.storage.fetch(self._suite.storage_key, self.path / SUITE)

    async def recover(self) -> None:
        """Store what earlier attempts wrote and their worker could not store any longer.

        This one continues after their newest checkpoint, so nobody would write it again.
        """
        async with unit_of_work(self.sessions) as session:
            job, _ = await fenced(session, self.lease)
            earlier = await session.scalars(
                select(AttemptRow)
                .where(AttemptRow.work_id == job.id, AttemptRow.ended_at.is_not(None))
                .order_by(AttemptRow.number)
            )
            for attempt in earlier:
                run = self.path.with_name(f"attempt-{attempt.number}")
                while has_more(run, attempt.relayed):
                    drafts, position = read_events(run, attempt.relayed)
                    if position == attempt.relayed:
                        break  # the beginning of a line, cut off
                    attempt.relayed = position
                    told = [draft for draft in drafts if draft.type is not EventType.STATUS]
                    await store_events(session, job, told)

    async def store_events(
        self, session: AsyncSession, job: JobRow, drafts: Sequence[EventDraft]
    ) -> None:
        """Store them, and note whether the child gets on."""
        await store_events(session, job, drafts)
        if any(draft.type not in NO_PROGRESS for draft in drafts):
            self._progress_at = time.monotonic()

    def pause(self) -> None:
        """Tell the child to stop at its next step."""
        (self.path / PAUSE).touch()

    def has_stalled(self) -> bool:
        """Whether the child has said nothing of progress for too long."""
        return time.monotonic() - self._progress_at > self.context.stall_seconds

    async def before_settling(self) -> None:
        """Store the checkpoints that this and earlier attempts have kept, however they ended.

        What hinders it is said in the job, and does not change how it ended.
        """
        runs = [
            self.path.with_name(f"attempt-{number}") for number in range(1, self.lease.attempt + 1)
        ]
        for run in runs:
            files = kept(run)
            if not files:
                continue
            problem = None
            try:
                await store_files(self.context, self.sessions, self, run, files)
            except OSError as error:
                problem = f"checkpoints were not stored: {error}"
                files = ()
            await until_stored(partial(self._register, files, problem))

    async def _register(self, files: Sequence[ProducedFile], problem: str | None) -> None:
        async with unit_of_work(self.sessions) as session:
            job, _ = await fenced(session, self.lease)
            await register_files(session, job.id, files)
            if problem:
                data = {"code": "checkpoints_not_stored", "message": problem}
                await append_events(session, job.id, [EventDraft(EventType.WARNING, data)])

    async def settle(self, outcome: Outcome) -> None:
        """Store files and result; or the failure, and what follows from it."""
        manifest = outcome.manifest
        if manifest is None:
            await until_stored(lambda: self._failed(outcome))
            return
        await store_files(self.context, self.sessions, self, self.path, manifest.files)

        async def store() -> None:
            async with unit_of_work(self.sessions) as session:
                job, _ = await fenced(session, self.lease)
                await register_files(session, job.id, manifest.files)
                job.result = manifest.result
                await end_attempt(session, job, AttemptOutcome.SUCCEEDED)
                if job.status == JobStatus.CANCELLING:  # asked for while the last file was stored
                    await end_cancelled(session, job)
                    return
                await switch_status(session, job, JobStatus.EXPORTING)
                await finish_job(session, job)  # at once, when there is nothing to export

        await until_stored(store)

    async def release(self) -> None:
        """Give it back to the queue, where it keeps its place."""
        async with unit_of_work(self.sessions) as session:
            await release(session, self.lease, "its worker was stopped; queued again")

    async def settle_cancelled(self) -> None:
        """Store the last events, as far as they come in some seconds, and end the job."""
        until = time.monotonic() + LAST_EVENTS_SECONDS
        more = True
        while more and time.monotonic() < until:
            more = await self.relay()
        async with unit_of_work(self.sessions) as session:
            job, _ = await fenced(session, self.lease)
            if more:
                message = "what the process said last was too much to be stored before the end"
                data = {"code": "events_not_stored", "message": message}
                await append_events(session, job.id, [EventDraft(EventType.WARNING, data)])
            await end_attempt(session, job, AttemptOutcome.CANCELLED)
            await end_cancelled(session, job)

    async def settle_stalled(self, child: ChildProcess) -> None:
        """Keep the stacks of its threads, end it, and queue the job again."""
        stacks = await dump_stacks(self.path)
        await child.kill()
        await self.before_settling()
        seconds = self.context.stall_seconds
        message = f"no progress for {seconds:g} s"

        async def store() -> None:
            async with unit_of_work(self.sessions) as session:
                job, _ = await fenced(session, self.lease)
                data = {"message": message, "stacks": stacks}
                await append_events(session, job.id, [EventDraft(EventType.STALLED, data)])
                await self._retryable(session, job, Reason.STALLED, message)

        await until_stored(store)

    async def _failed(self, outcome: Outcome) -> None:
        async with unit_of_work(self.sessions) as session:
            job, _ = await fenced(session, self.lease)
            message = outcome.message
            if outcome.reason is Reason.PAUSED_BY_USER and job.reason == Reason.PREEMPTED:
                await requeue(session, job, "yielded to a job of a higher class; queued again")
                return
            last = f"last output:\n{last_lines(self.path, LAST_LINES)}"
            data = {"level": "error", "message": last}
            await append_events(session, job.id, [EventDraft(EventType.LOG, data)])
            if outcome.reason in RETRYABLE:
                await self._retryable(session, job, outcome.reason, message)
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

    async def _retryable(
        self, session: AsyncSession, job: JobRow, reason: Reason, message: str
    ) -> None:
        policy = self.context.retry_policy
        await end_lost(session, job, policy, RETRYABLE[reason], reason, message)
        if job.status == JobStatus.FAILED:
            await cancel_exports(session, job.id)
        if reason is Reason.GPU_FAILED:
            await note_gpu_failure(session, self.context.worker_id, message)


def _ended_as(reason: Reason) -> AttemptOutcome:
    if reason is Reason.OUT_OF_MEMORY:
        return AttemptOutcome.OUT_OF_MEMORY
    return AttemptOutcome.PAUSED if reason in PAUSES else AttemptOutcome.FAILED
