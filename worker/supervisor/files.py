"""Moves a run's files into the artifact store, and makes them known."""

from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import repository as artifacts
from app.jobs.lifecycle import EventDraft, append_events
from app.storage import Storage
from dressage.spec.event import EventType
from worker.training.run_dir import Manifest


def store_files(storage: Storage, run: Path, manifest: Manifest) -> None:
    """Copy every file of a manifest in, checked against its checksum."""
    for file in manifest.files:
        storage.put_file(run / "artifacts" / file.name, file.sha256)


async def register_files(session: AsyncSession, job_id: str, manifest: Manifest) -> None:
    """Add stored files to a job, each with its event, in a transaction that checked the lease."""
    for file in manifest.files:
        await artifacts.save(session, job_id, **file.model_dump())
        data = file.model_dump(mode="json")
        await append_events(session, job_id, [EventDraft(EventType.ARTIFACT, data)])
