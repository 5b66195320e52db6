"""Receive, check and store a suite. Its code is imported in the sandbox alone."""

import asyncio
import io
import itertools
import tempfile
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy.ext.asyncio import AsyncSession

from app.artifacts import blobs
from app.db.base import new_id
from app.db.engine import Sessions
from app.db.models import SuiteRow
from app.exceptions import FieldProblem, NotFound, SuiteInUse, SuiteInvalid, UploadTooLarge
from app.pools import TeamPool
from app.storage import Storage
from app.suites import repository
from app.teams import quotas
from dressage.authoring.suite import CASES_FILE, FieldMapping, Suite, SuiteError
from dressage.measuring.profile import SuiteProfile
from dressage.sandbox.loading import Code
from dressage.sandbox.process import Sandbox, SandboxStartError
from dressage.spec.suite import Case


async def receive(
    chunks: AsyncIterator[bytes], target: BinaryIO, *, announced: int | None, limit: int
) -> None:
    """Stream an upload into a file.

    Raises:
        UploadTooLarge: It is, or says it is, bigger than the limit.
    """
    if announced is not None and announced > limit:
        raise UploadTooLarge(f"the upload has {announced} bytes; the limit is {limit}")
    received = 0
    async for chunk in chunks:
        received += len(chunk)
        if received > limit:
            raise UploadTooLarge(f"the upload is longer than the limit of {limit} bytes")
        target.write(chunk)
    target.seek(0)


async def store(
    session: AsyncSession,
    sessions: Sessions,
    storage: Storage,
    pool: TeamPool,
    *,
    team: str,
    name: str,
    upload: BinaryIO,
    csv_text: bool,
    mapping: FieldMapping | None,
) -> tuple[SuiteRow, bool]:
    """Check and store. Returns the suite, and whether it is a new version.

    Raises:
        SuiteInvalid: Anything is wrong; nothing was stored.
    """
    try:
        suite, profile, code = await pool.run(team, lambda: _read(upload, csv_text, mapping))
    except SuiteError as error:
        raise SuiteInvalid(
            str(error),
            [
                FieldProblem(field=problem.file, line=problem.line, message=problem.message)
                for problem in error.problems
            ],
        ) from None
    except SandboxStartError as error:
        raise SuiteInvalid(str(error), [FieldProblem(message=str(error))]) from None
    name_row = await repository.lock_name(session, team, name)
    known = await repository.same_content(session, team, name, suite.content_hash)
    if known:
        return known, False
    archive = await asyncio.to_thread(suite.to_archive)
    await quotas.require_storage(session, team, len(archive))
    storage_key = await blobs.store_bytes(sessions, storage, archive)
    await blobs.mark_referenced(session, [storage_key])
    name_row.versions += 1
    row = SuiteRow(
        id=new_id("suite"),
        team=team,
        name=name,
        version=name_row.versions,
        content_hash=suite.content_hash,
        storage_key=storage_key,
        size=len(archive),
        case_count=len(suite.cases),
        profile=profile.model_dump(mode="json"),
        **code,
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    return row, True


def load(storage: Storage, row: SuiteRow) -> Suite:
    """Read a stored suite."""
    return Suite.from_upload(io.BytesIO(storage.read(row.storage_key)))


def read_cases(storage: Storage, row: SuiteRow, start: int, limit: int) -> list[Case]:
    """Some cases of a stored suite, without reading the others into memory."""
    with tempfile.TemporaryDirectory(prefix="dressage-cases-") as folder:
        file = Path(folder) / "suite.zip"
        storage.fetch(row.storage_key, file)
        with zipfile.ZipFile(file) as archive, archive.open(CASES_FILE) as lines:
            wanted = itertools.islice(lines, start, start + limit)
            return [Case.model_validate_json(line) for line in wanted]


async def delete(session: AsyncSession, row: SuiteRow) -> None:
    """Remove a version that no job uses. Its number is not given again.

    Raises:
        NotFound: Somebody else has removed it just now.
        SuiteInUse: Jobs use it; what they were trained on stays known as long as they are.
    """
    # Locked: who submits a job now waits, or is seen.
    locked = await session.get(SuiteRow, row.id, with_for_update=True, populate_existing=True)
    if locked is None:
        raise NotFound(f"there is no suite {row.name}@{row.version}")
    jobs = await repository.jobs_of(session, row.id)
    if jobs:
        raise SuiteInUse(
            f"{jobs} jobs use {row.name}@{row.version}; delete them first (GET /jobs lists them)"
        )
    await session.delete(row)
    await blobs.mark_unreferenced(session, [row.storage_key])


def _read(
    upload: BinaryIO, csv_text: bool, mapping: FieldMapping | None
) -> tuple[Suite, SuiteProfile, dict[str, Any]]:
    suite = Suite.from_upload(upload, csv_text=csv_text, mapping=mapping)
    profile = SuiteProfile.of(suite.cases)
    if not any(name.endswith(".py") for name in suite.code):
        return suite, profile, Code().contents()
    with tempfile.TemporaryDirectory(prefix="dressage-suite-") as folder:
        suite.write_code(Path(folder))
        sandbox = Sandbox(Path(folder))
        sandbox.close()
        return suite, profile, sandbox.contents
