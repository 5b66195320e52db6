"""One export on this worker: claim → spawn → relay → settle. The trained files are only read."""

import asyncio
import contextlib
import errno
import shutil

import structlog

from app.artifacts import repository as artifacts
from app.db.engine import DATABASE_AWAY, Sessions, create_engine, create_sessions, unit_of_work
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
from dressage.spec.job import JobSpec
from dressage.spec.status import ExportStatus, JobStatus, Reason
from worker.supervisor.context import WorkerContext
from worker.supervisor.files import register_files, store_files
from worker.supervisor.outcome import Outcome, outcome_of, read_outcome
from worker.supervisor.process import ChildProcess
from worker.supervisor.relay import has_more, read_events
from worker.supervisor.watch import Ending, patiently, until_stored, watch
from worker.training.export.spec import ExportRunSpec
from worker.training.run_dir import INPUT, SPEC, SUITE

log = structlog.get_logger()


async def run_next_export(context: WorkerContext) -> bool:
    """Claim and run one export. False when there is none."""
    engine = create_engine(context.database_url, pooled=False)
    sessions = create_sessions(engine)
    try:
        async with unit_of_work(sessions) as session:
            lease = await claim_export(session)
            if lease is None:
                return False
            job = await session.get_one(JobRow, lease.job_id)
            suite = await session.get_one(SuiteRow, job.suite_id)
            trained = await artifacts.trained(session, job.id, lease.spec.get("checkpoint"))
    except DATABASE_AWAY as error:
        log.warning("claim.database", error=str(error).splitlines()[:1])
        return False
    with structlog.contextvars.bound_contextvars(job_id=lease.job_id, export=lease.name):
        log.info("export.claimed", attempt=lease.attempt)
        work = ExportRun(context, sessions, lease)
        with contextlib.suppress(StaleLease):  # somebody else's by now: nothing may be written
            try:
                if trained is None:  # removed since it was asked for
                    await work.settle(Outcome(None, Reason.FILES_REMOVED, "its files are gone"))
                else:
                    await patiently(context, work, lambda: work.prepare(job, suite, trained))
                    await work.run()
            except StaleLease:
                raise
            except Exception as error:
                log.exception("export.not_settled")
                await work.settle(outcome_of(error))
        await asyncio.to_thread(work.clean)
    return True


class ExportRun:
    """One attempt at an export, from its directory to its end."""

    def __init__(self, context: WorkerContext, sessions: Sessions, lease: ExportLease) -> None:
        self._context, self._sessions, self._lease = context, sessions, lease
        self._run = context.runs_dir / lease.job_id / f"{lease.name}-attempt-{lease.attempt}"
        self._relayed = 0

    def prepare(self, job: JobRow, suite: SuiteRow, trained: ArtifactRow) -> None:
        """Lay out the run directory."""
        self._run.mkdir(parents=True, exist_ok=True)  # a second time when the store was away
        storage = self._context.storage
        needed, free = 2 * trained.size, shutil.disk_usage(self._run).free  # packed and unpacked
        if free < needed:
            raise OSError(
                errno.ENOSPC, f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
            )
        job_spec = JobSpec.model_validate(job.spec)
        spec = ExportRunSpec(
            export=self._lease.spec,
            job=job_spec,
            job_id=job.id,
            trained=job_spec.training.result_kind,
            ollama_url=self._lease.spec.get("server") or self._first_ollama(),
            attempt=self._lease.attempt,
            registered=((self._lease.result or {}).get("ollama") or {}).get("digest"),
        )
        (self._run / SPEC).write_text(spec.model_dump_json(indent=1))
        storage.fetch(trained.sha256, self._run / INPUT)
        storage.fetch(suite.storage_key, self._run / SUITE)

    def _first_ollama(self) -> str | None:
        return self._context.ollama_urls[0] if self._context.ollama_urls else None

    async def run(self) -> None:
        """Start the child, watch it, store what came of it."""
        child = await ChildProcess.start(self._context.export_module, self._run)
        try:
            ending = await watch(self._context, child, self)
            log.info("child.ended", ending=ending, returncode=child.returncode)
            if ending is Ending.STOPPING:
                await until_stored(self._release)
            elif ending is Ending.CANCELLED:
                await until_stored(self._cancelled)
            elif ending is Ending.EXITED:
                await self.settle(read_outcome(self._run, child.returncode))
        finally:
            await child.kill()

    def clean(self) -> None:
        """Remove the run directory: it has copies alone, and no other attempt uses it."""
        shutil.rmtree(self._run, ignore_errors=True)

    async def heartbeat(self) -> JobStatus:
        """Keep the lease; the job's status."""
        async with unit_of_work(self._sessions) as session:
            return await heartbeat_export(session, self._lease)

    async def relay(self) -> bool:
        """Store the next batch of events; whether there was one."""
        if not has_more(self._run, self._relayed):
            return False
        async with unit_of_work(self._sessions) as session:
            job, export = await fenced_export(session, self._lease)
            drafts, export.relayed = read_events(self._run, export.relayed)
            named = [
                EventDraft(draft.type, {**draft.data, "export": self._lease.name}, draft.time)
                for draft in drafts
            ]
            await append_events(session, job.id, named)
        self._relayed = export.relayed
        return bool(drafts)

    def pause(self) -> None:
        """Exports run to their end."""

    def has_stalled(self) -> bool:
        """A conversion says nothing for as long as it takes."""
        return False

    async def settle(self, outcome: Outcome) -> None:
        """Store the files, or why there are none."""
        manifest = outcome.manifest
        succeeded = manifest is not None and manifest.failure is None
        if manifest:
            await store_files(self._context, self._sessions, self, self._run, manifest.files)

        async def store() -> None:
            async with unit_of_work(self._sessions) as session:
                if manifest:
                    job, _ = await fenced_export(session, self._lease)
                    await register_files(session, job.id, manifest.files)
                await settle_export(
                    session,
                    self._lease,
                    ExportStatus.SUCCEEDED if succeeded else ExportStatus.FAILED,
                    self._context.retry_policy,
                    reason=outcome.reason,
                    message=outcome.message or None,
                    result=manifest.result if manifest else None,
                )

        await until_stored(store)

    async def _release(self) -> None:
        async with unit_of_work(self._sessions) as session:
            await release_export(session, self._lease)

    async def _cancelled(self) -> None:
        async with unit_of_work(self._sessions) as session:
            await settle_export(
                session,
                self._lease,
                ExportStatus.CANCELLED,
                self._context.retry_policy,
                reason=Reason.CANCELLED_BY_USER,
            )
