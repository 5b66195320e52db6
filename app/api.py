"""All routes."""

from fastapi import APIRouter
from sqlalchemy import text

from app.artifacts.endpoints import router as artifacts
from app.dependencies import InTransaction
from app.exceptions import PROBLEM_RESPONSES
from app.generations.endpoints import router as generations
from app.jobs.endpoints import router as jobs
from app.measures.endpoints import router as measures
from app.suites.endpoints import router as suites
from app.sweeps.endpoints import router as sweeps

router = APIRouter(responses=PROBLEM_RESPONSES)
router.include_router(suites)
router.include_router(jobs)
router.include_router(artifacts)
router.include_router(measures)
router.include_router(sweeps)
router.include_router(generations)


@router.get("/healthz", tags=["service"])
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", tags=["service"])
async def readyz(transaction: InTransaction) -> dict[str, str]:
    """The database answers, too."""
    await transaction.session.execute(text("SELECT 1"))
    return {"status": "ready"}
