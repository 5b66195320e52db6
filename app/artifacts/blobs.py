"""Which files of the artifact store may be removed.

Files and rows cannot change in one transaction, and equal files are kept once, so a file is never
removed together with its row. The transaction that deletes the row notes the file as an orphan;
`sweep` removes it later, if no row points to it then. Whoever stores a file reserves it before: a
note with a day of grace, taken back in the transaction whose row points to the file. So a file that
was stored and never referenced is removed, too, and none that somebody is about to reference.
"""

import asyncio
import hashlib
from collections.abc import Collection
from datetime import timedelta

from sqlalchemy import Select, delete, func, select, union
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import Sessions, unit_of_work
from app.db.models import ArtifactRow, OrphanBlobRow, SuiteRow
from app.storage import Storage

GRACE = timedelta(days=1)  # from the note to the end of an upload
FILES_AT_ONCE = 50


async def store_bytes(sessions: Sessions, storage: Storage, data: bytes) -> str:
    """Store a small file, reserved first. Returns its key, for `mark_referenced`.

    Raises:
        StorageUnavailable: The store does not take it.
    """
    async with unit_of_work(sessions) as session:
        await reserve(session, [hashlib.sha256(data).hexdigest()])
    return await asyncio.to_thread(storage.put_bytes, data)


async def reserve(session: AsyncSession, files: Collection[str]) -> None:
    """Note, in a transaction of its own, what is stored next. Waits for a sweep of these files."""
    due = func.clock_timestamp() + GRACE
    for sha256 in sorted(files):  # in one order, so that two of these never wait for each other
        note = insert(OrphanBlobRow).values(sha256=sha256, due=due)
        await session.execute(
            note.on_conflict_do_update(index_elements=["sha256"], set_={"due": due})
        )


async def mark_referenced(session: AsyncSession, files: Collection[str]) -> None:
    """Take the note back, in the transaction whose rows point to these files now."""
    await session.execute(delete(OrphanBlobRow).where(OrphanBlobRow.sha256.in_(files)))


async def mark_unreferenced(session: AsyncSession, files: Collection[str]) -> None:
    """Note files whose rows this transaction deletes. Others may point to them, too."""
    for sha256 in sorted(files):
        note = insert(OrphanBlobRow).values(sha256=sha256, due=func.clock_timestamp())
        # Somebody who is about to store the same keeps the grace.
        await session.execute(note.on_conflict_do_nothing())


async def sweep(sessions: Sessions, storage: Storage) -> int:
    """Remove some files that nothing points to. Returns how many notes were dealt with.

    Raises:
        StorageUnavailable: The store does not answer; all of them stay noted.
    """
    async with unit_of_work(sessions) as session:
        found = await session.scalars(
            select(OrphanBlobRow.sha256)
            .where(OrphanBlobRow.due <= func.clock_timestamp())
            .order_by(OrphanBlobRow.due)
            .limit(FILES_AT_ONCE)
            .with_for_update(skip_locked=True)
        )
        orphans = set(found.all())
        used = set((await session.scalars(_pointed_to(orphans))).all())
        # The notes stay locked meanwhile: who stores the same waits, and then finds it gone.
        for sha256 in sorted(orphans - used):
            await asyncio.to_thread(storage.remove, sha256)
        await mark_referenced(session, orphans)
    return len(orphans)


def _pointed_to(files: Collection[str]) -> Select[tuple[str]]:
    of_jobs = select(ArtifactRow.sha256).where(ArtifactRow.sha256.in_(files))
    of_suites = select(SuiteRow.storage_key).where(SuiteRow.storage_key.in_(files))
    both = union(of_jobs, of_suites).subquery()
    return select(both.c[0])
