"""Queries on artifacts."""

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import new_id
from app.db.models import ArtifactRow
from dressage.spec.artifact import Artifact, ArtifactKind


async def get(session: AsyncSession, job_id: str, name: str) -> ArtifactRow | None:
    """A job's file by its name."""
    found: ArtifactRow | None = await session.scalar(
        select(ArtifactRow).where(ArtifactRow.job_id == job_id, ArtifactRow.name == name)
    )
    return found


async def of_kind(
    session: AsyncSession, job_id: str, kinds: tuple[ArtifactKind, ...]
) -> ArtifactRow | None:
    """A job's file of one of these kinds."""
    found: ArtifactRow | None = await session.scalar(
        select(ArtifactRow).where(ArtifactRow.job_id == job_id, ArtifactRow.kind.in_(kinds))
    )
    return found


async def save(
    session: AsyncSession, job_id: str, *, kind: ArtifactKind, name: str, size: int, sha256: str
) -> None:
    """Register a stored file; one made again replaces the one before."""
    statement = insert(ArtifactRow).values(
        id=new_id("artifact"), job_id=job_id, kind=kind, name=name, size=size, sha256=sha256
    )
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=["job_id", "name"], set_={"size": size, "sha256": sha256}
        )
    )


def artifact_view(row: ArtifactRow) -> Artifact:
    """A file as the service shows it."""
    return Artifact(
        id=row.id,
        kind=ArtifactKind(row.kind),
        name=row.name,
        size=row.size,
        sha256=row.sha256,
        created_at=row.created_at,
    )
