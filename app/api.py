"""All routes."""

import asyncio

from fastapi import APIRouter
from sqlalchemy import text

from app.artifacts.endpoints import router as artifacts
from app.db.engine import unit_of_work
from app.dependencies import Parts
from app.exceptions import PROBLEM_RESPONSES
from app.exports.endpoints import router as exports
from app.generations.endpoints import router as generations
from app.jobs.endpoints import router as jobs
from app.keys.endpoints import router as keys
from app.measures.endpoints import router as measures
from app.scheduling.endpoints import router as queue
from app.suites.endpoints import router as suites
from app.sweeps.endpoints import router as sweeps
from app.teams.endpoints import router as teams
from app.webhooks.endpoints import router as webhooks
from app.workers.endpoints import router as workers

router = APIRouter(responses=PROBLEM_RESPONSES)
for part in (
    *(suites, jobs, exports, artifacts, measures, sweeps, generations),
    *(queue, workers, teams, keys, webhooks),
):
    router.include_router(part)


@router.get("/healthz", tags=["service"])
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", tags=["service"])
async def readyz(parts: Parts) -> dict[str, str]:
    """The database and the artifact store answer, too."""
    async with unit_of_work(parts.sessions) as session:
        await session.execute(text("SELECT 1"))
    await asyncio.to_thread(parts.storage.check)
    return {"status": "ready"}
