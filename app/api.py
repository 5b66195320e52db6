"""All routes."""

from typing import Literal

from fastapi import Request, Response
from pydantic import BaseModel, Field

from app.artifacts.endpoints import router as artifacts
from app.comparisons.endpoints import router as comparisons
from app.exceptions import PROBLEM_RESPONSES
from app.exports.endpoints import router as exports
from app.gate import ApiRouter
from app.generations.endpoints import router as generations
from app.health import OK, Health
from app.jobs.endpoints import router as jobs
from app.keys.endpoints import router as keys
from app.measures.endpoints import router as measures
from app.scheduling.endpoints import router as queue
from app.suites.endpoints import router as suites
from app.sweeps.endpoints import router as sweeps
from app.teams.endpoints import router as teams
from app.webhooks.endpoints import router as webhooks
from app.workers.endpoints import router as workers

router = ApiRouter(responses=PROBLEM_RESPONSES)
for part in (
    *(suites, jobs, exports, artifacts, comparisons, measures, sweeps, generations),
    *(queue, workers, teams, keys, webhooks),
):
    router.include_router(part)


@router.get("/healthz", tags=["service"])
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


class Readiness(BaseModel):
    """What `/readyz` says."""

    status: Literal["ready", "not_ready"]
    checks: dict[str, str] = Field(description="Each part: `ok`, or what is wrong with it.")


@router.get(
    "/readyz",
    tags=["service"],
    responses={503: {"model": Readiness, "description": "Jobs would not run."}},
)
async def readyz(request: Request, response: Response) -> Readiness:
    """Jobs run: the database takes writes; store, broker and scheduler answer."""
    state: Health = request.app.state.health
    found = await state.checks()
    ready = all(text == OK for text in found.values())
    response.status_code = 200 if ready else 503
    return Readiness(status="ready" if ready else "not_ready", checks=found)
