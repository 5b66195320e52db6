"""All routes."""

import asyncio

from fastapi import APIRouter
from sqlalchemy import text

from app.artifacts.endpoints import router as artifacts
from app.auth.endpoints import router as keys
from app.db.engine import unit_of_work
from app.dependencies import Parts
from app.exceptions import PROBLEM_RESPONSES
from app.generations.endpoints import router as generations
from app.jobs.endpoints import router as jobs
from app.measures.endpoints import router as measures
from app.suites.endpoints import router as suites
from app.sweeps.endpoints import router as sweeps
from app.teams.endpoints import router as teams
from app.webhooks.endpoints import router as webhooks
from app.workers.endpoints import router as workers

router = APIRouter(responses=PROBLEM_RESPONSES)
router.include_router(suites)
router.include_router(jobs)
router.include_router(artifacts)
router.include_router(measures)
router.include_router(sweeps)
router.include_router(generations)
router.include_router(workers)
router.include_router(teams)
router.include_router(keys)
router.include_router(webhooks)


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
