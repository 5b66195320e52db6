"""`/compare` and `/jobs/{id}/regrade`."""

from typing import Annotated

from fastapi import Query

from app import examples
from app.comparisons import compare, regrade
from app.dependencies import InTransaction, Parts, Team, VisibleJob, VisibleTeam
from app.gate import ApiRouter
from dressage.spec.comparison import Comparison, Regrade, RegradeSpec

router = ApiRouter(tags=["comparisons"])


@router.get("/compare", responses=examples.shown(examples.COMPARISON))
async def compare_jobs(
    transaction: InTransaction,
    team: VisibleTeam,
    jobs: Annotated[
        str, Query(max_length=1000, description="Ids of 2 to 10 jobs, separated by commas.")
    ],
    evaluation: Annotated[
        str | None,
        Query(max_length=100, description="Of each job; its last one unless given."),
    ] = None,
) -> Comparison:
    """Evaluations on the same cases, pair by pair, with intervals and the cases that flipped."""
    return await compare.of_jobs(transaction.session, team, jobs.split(","), evaluation)


@router.post("/jobs/{job_id}/regrade", responses=examples.shown(examples.REGRADE))
async def regrade_job(job: VisibleJob, request: RegradeSpec, team: Team, parts: Parts) -> Regrade:
    """Grade stored rollouts by other measures: which rewards, groups and advantages change."""
    return await regrade.of_job(
        parts.sessions,
        parts.storage,
        parts.policy,
        parts.previews,
        team=team,
        job=job,
        request=request,
    )
