"""Queries on artifacts."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import blobs
from app.db.base import new_id
from app.db.models import ArtifactRow
from dressage.spec.artifact import ArtifactKind, checkpoint_name, checkpoint_step

RESULTS = (ArtifactKind.ADAPTER, ArtifactKind.MODEL)


async def get(session: AsyncSession, job_id: str, name: str) -> ArtifactRow | None:
    """A job's file by its name."""
    found: ArtifactRow | None = await session.scalar(
        select(ArtifactRow).where(ArtifactRow.job_id == job_id, ArtifactRow.name == name)
    )
    return found


async def artifacts_of(session: AsyncSession, job_ids: Sequence[str]) -> Sequence[ArtifactRow]:
    """All artifacts of some jobs, oldest first."""
    query = select(ArtifactRow).where(ArtifactRow.job_id.in_(job_ids))
    return (await session.scalars(query.order_by(ArtifactRow.created_at, ArtifactRow.id))).all()


async def trained(
    session: AsyncSession, job_id: str, checkpoint: int | None = None
) -> ArtifactRow | None:
    """What a job has trained: its result, or the checkpoint of a step."""
    if checkpoint is not None:
        return await get(session, job_id, checkpoint_name(checkpoint))
    found: ArtifactRow | None = await session.scalar(
        select(ArtifactRow).where(ArtifactRow.job_id == job_id, ArtifactRow.kind.in_(RESULTS))
    )
    return found


async def checkpoints(session: AsyncSession, job_id: str) -> list[int]:
    """The steps whose checkpoints a job keeps."""
    names = await session.scalars(
        select(ArtifactRow.name).where(
            ArtifactRow.job_id == job_id, ArtifactRow.kind == ArtifactKind.CHECKPOINT
        )
    )
    return sorted(checkpoint_step(name) for name in names)


async def save(
    session: AsyncSession, job_id: str, *, kind: ArtifactKind, name: str, size: int, sha256: str
) -> bool:
    """Register a stored file; one made again replaces the one before. False: it is the same."""
    await blobs.mark_referenced(session, [sha256])
    before = await get(session, job_id, name)
    if before and before.sha256 == sha256:
        return False
    if before:
        await blobs.mark_unreferenced(session, [before.sha256])
    statement = insert(ArtifactRow).values(
        id=new_id("artifact"), job_id=job_id, kind=kind, name=name, size=size, sha256=sha256
    )
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=["job_id", "name"], set_={"size": size, "sha256": sha256}
        )
    )
    return True
