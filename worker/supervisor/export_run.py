"""One export, or one question, on this worker. The trained files are only read."""

import asyncio
import errno
import shutil
from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import repository as artifacts
from app.db.engine import Sessions, unit_of_work
from app.db.models import ArtifactRow, JobRow, SuiteRow
from app.exports.leases import (
    ExportClaim,
    claim_export,
    fenced_export,
    release_export,
    settle_export,
)
from app.lifecycle.jobs import EventDraft, append_events
from dressage.spec.export import without_secrets
from dressage.spec.job import JobSpec
from dressage.spec.status import ExportStatus, Reason
from worker.supervisor.context import WorkerContext
from worker.supervisor.files import register_files, store_files
from worker.supervisor.leased_run import LeasedRun, claimed
from worker.supervisor.outcome import CannotRun, Outcome
from worker.supervisor.watch import until_stored
from worker.wire.export_spec import ExportRunSpec
from worker.wire.run_dir import INPUT, SPEC, SUITE

Found = tuple[ExportClaim, JobRow, SuiteRow, ArtifactRow | None]


async def run_next_export(context: WorkerContext) -> bool:
    """Claim and run one export. False: no export waits."""

    async def claim(session: AsyncSession) -> Found | None:
        export = await claim_export(session, context.worker_id)
        if export is None:
            return None
        job = await session.get_one(JobRow, export.lease.job_id)
        suite = await session.get_one(SuiteRow, job.suite_id)
        trained = await artifacts.trained(session, job.id, export.spec.get("checkpoint"))
        return export, job, suite, trained

    sessions, found = await claimed(context, claim)
    if found is None:
        return False
    await ExportRun(context, sessions, *found).carry_out()
    return True


class ExportRun(LeasedRun):
    """One attempt at an export."""

    def __init__(
        self,
        context: WorkerContext,
        sessions: Sessions,
        export: ExportClaim,
        job: JobRow,
        suite: SuiteRow,
        trained: ArtifactRow | None,
    ) -> None:
        super().__init__(context, sessions, export.lease)
        self._export, self._job, self._suite, self._trained = export, job, suite, trained
        self.module = context.export_module
        folder = f"{export.name}-attempt-{export.lease.attempt}"
        self.path = context.runs_dir / job.id / folder

    async def carry_out(self) -> None:
        """Run it to its end, and remove the directory: it has copies alone, for this attempt."""
        await super().carry_out()
        await asyncio.to_thread(shutil.rmtree, self.path, ignore_errors=True)

    def lay_out(self) -> None:
        """Write the specification, and copy what was trained and its suite.

        Raises:
            CannotRun: The trained files are gone since it was asked for.
        """
        if self._trained is None:
            raise CannotRun(Reason.FILES_REMOVED, "its files are gone")
        self.path.mkdir(parents=True, exist_ok=True)
        storage, asked = self.context.storage, self._export.spec
        needed = 2 * self._trained.size  # packed and unpacked
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise OSError(
                errno.ENOSPC, f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
            )
        job_spec = JobSpec.model_validate(self._job.spec)
        spec = ExportRunSpec(
            export=asked,
            job=job_spec,
            job_id=self._job.id,
            trained=job_spec.training.result_kind,
            ollama_url=_server(self.context.ollama_urls, asked.get("server")),
            longest_prompt=(self._job.result or {}).get("longest_prompt", 0),
            attempt=self.lease.attempt,
        )
        (self.path / SPEC).write_text(spec.model_dump_json(indent=1))
        storage.fetch(self._trained.sha256, self.path / INPUT)
        storage.fetch(self._suite.storage_key, self.path / SUITE)

    async def store_events(
        self, session: AsyncSession, job: JobRow, drafts: Sequence[EventDraft]
    ) -> None:
        """Store them with the export's name."""
        named = [
            EventDraft(draft.type, {**draft.data, "export": self._export.name}, draft.time)
            for draft in drafts
        ]
        await append_events(session, job.id, named)

    async def settle(self, outcome: Outcome) -> None:
        """Store the files, or why no file was made."""
        manifest = outcome.manifest
        succeeded = manifest is not None and manifest.failure is None
        if manifest:
            await store_files(self.context, self.sessions, self, self.path, manifest.files)

        async def store() -> None:
            async with unit_of_work(self.sessions) as session:
                if manifest:
                    job, _, _ = await fenced_export(session, self.lease)
                    await register_files(session, job.id, manifest.files)
                await settle_export(
                    session,
                    self.lease,
                    ExportStatus.SUCCEEDED if succeeded else ExportStatus.FAILED,
                    self.context.retry_policy,
                    reason=outcome.reason,
                    message=outcome.message or None,
                    result=manifest.result if manifest else None,
                )

        await until_stored(store)

    async def settle_cancelled(self) -> None:
        """Store that it was cancelled with its job."""
        async with unit_of_work(self.sessions) as session:
            await settle_export(
                session,
                self.lease,
                ExportStatus.CANCELLED,
                self.context.retry_policy,
                reason=Reason.CANCELLED_BY_USER,
            )

    async def release(self) -> None:
        """Give it back to the queue."""
        async with unit_of_work(self.sessions) as session:
            await release_export(session, self.lease)


def _server(urls: Sequence[str], wanted: str | None) -> str | None:
    """The operator's address of a server that is named without its password."""
    by_name = {without_secrets(url): url for url in urls}
    return by_name.get(wanted) if wanted else next(iter(urls), None)
