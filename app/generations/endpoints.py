"""`/jobs/{id}/generate`: try the trained agent."""

from typing import Annotated

from fastapi import Query, Response

from app import examples
from app.dependencies import InTransaction, Parts, VisibleJob, VisibleTeam
from app.gate import ApiRouter
from app.generations import service
from dressage.spec.generation import Generation, GenerationSpec
from dressage.spec.status import EXPORT_TERMINAL

router = ApiRouter(prefix="/jobs/{job_id}", tags=["generations"])


@router.post(
    "/generate",
    responses={
        202: {"model": Generation, "description": "Not ready yet; `Location` says where to look."},
        **examples.shown(examples.GENERATION),
    },
)
async def generate(
    job: VisibleJob,
    request: GenerationSpec,
    transaction: InTransaction,
    team: VisibleTeam,
    parts: Parts,
    response: Response,
    wait: Annotated[float, Query(ge=0, le=300, description="Seconds to wait.")] = 60,
) -> Generation:
    """Ask the trained agent: with its tools and instructions, on a worker."""
    row = await service.submit(
        transaction.session, transaction.wakes, parts.storage, parts.policy, job, request
    )
    generation_id = row.id
    # The worker must see it while this request waits for its answer.
    response.headers["Location"] = f"/jobs/{job.id}/generations/{generation_id}"
    await transaction.commit()
    found = await service.wait_for(parts.sessions, team, job.id, generation_id, wait)
    response.status_code = 200 if found.status in EXPORT_TERMINAL else 202
    return found


@router.get("/generations/{generation_id}", responses=examples.shown(examples.GENERATION))
async def get_generation(
    job_id: str, generation_id: str, transaction: InTransaction, team: VisibleTeam
) -> Generation:
    """One answer, or how far it is."""
    row = await service.find(transaction.session, team, job_id, generation_id)
    return Generation.model_validate(row)
