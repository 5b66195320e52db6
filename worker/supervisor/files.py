"""Moves a run's files into the artifact store, and makes them known."""

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import blobs
from app.artifacts import repository as artifacts
from app.db.engine import Sessions, unit_of_work
from app.lifecycle.jobs import EventDraft, append_events
from dressage.spec.event import EventType
from worker.supervisor.context import WorkerContext
from worker.supervisor.watch import Watched, patiently, until_stored
from worker.wire.run_dir import ProducedFile


async def store_files(
    context: WorkerContext,
    sessions: Sessions,
    work: Watched,
    run: Path,
    files: Sequence[ProducedFile],
) -> None:
    """Copy files of a run in, checked against their checksums, while the lease is kept.

    Raises:
        StaleLease: The work is somebody else's by now.
        ChecksumMismatch: A file is not the one that the run has described.
    """

    async def reserve() -> None:
        async with unit_of_work(sessions) as session:
            await blobs.reserve(session, {file.sha256 for file in files})

    def copy() -> None:
        for file in files:
            context.storage.put_file(run / "artifacts" / file.name, file.sha256)

    await until_stored(reserve)
    await patiently(context, work, copy)


async def register_files(session: AsyncSession, job_id: str, files: Sequence[ProducedFile]) -> None:
    """Add stored files to a job, each with its event, in a transaction that checked the lease."""
    for file in files:
        if await artifacts.save(session, job_id, **file.model_dump()):
            data = file.model_dump(mode="json")
            await append_events(session, job_id, [EventDraft(EventType.ARTIFACT, data)])
