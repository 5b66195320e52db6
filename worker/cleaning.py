"""Removes run directories that nobody needs any longer, so that no worker's disk fills up."""

import re
import shutil
from datetime import timedelta
from pathlib import Path

import structlog
from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import JobRow

log = structlog.get_logger()

JOB_ID = re.compile(r"job_[0-9a-f]+")


async def runs_to_remove(session: AsyncSession, runs: Path, age: timedelta) -> list[Path]:
    """Directories of jobs that are deleted, or that ended longer ago. Everything else stays."""
    found = [path for path in runs.glob("job_*") if JOB_ID.fullmatch(path.name)]
    needed = await session.scalars(
        select(JobRow.id).where(
            JobRow.id.in_([path.name for path in found]),
            or_(
                JobRow.finished_at.is_(None),
                JobRow.finished_at > func.clock_timestamp() - age,
            ),
        )
    )
    keep = set(needed)
    return [path for path in found if path.name not in keep]


def remove(paths: list[Path]) -> None:
    """Remove them. Several workers may share a disk: what is gone already is no error."""
    for path in paths:
        log.info("run.removed", run=path.name)
        shutil.rmtree(path, ignore_errors=True)
