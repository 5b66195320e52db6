"""`/jobs/{id}/exports`: other forms of what a job has trained."""

from typing import Annotated

from fastapi import Body, Response

from app import examples
from app.dependencies import InTransaction, Parts, VisibleJob
from app.exceptions import NotFound
from app.exports import repository, service
from app.gate import ApiRouter
from dressage.spec.export import ExportSpec
from dressage.spec.job import ExportView

router = ApiRouter(prefix="/jobs/{job_id}/exports", tags=["exports"])


@router.post(
    "",
    status_code=201,
    responses={
        200: {"model": ExportView, "description": "It waits, runs or is done already."},
        **examples.shown({**examples.EXPORT, "status": "queued", "attempts": 0}, 201),
    },
)
async def export_job(
    job: VisibleJob,
    spec: Annotated[ExportSpec, Body(openapi_examples={"gguf": {"value": examples.EXPORT_SPEC}})],
    transaction: InTransaction,
    parts: Parts,
    response: Response,
) -> ExportView:
    """Make another file of a trained job, or try one again that failed."""
    row, is_new = await service.request_export(
        transaction.session, transaction.wakes, parts.policy, job, spec
    )
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"/jobs/{job.id}/exports/{row.id}"
    return ExportView.model_validate(row)


@router.get("", responses=examples.shown([examples.EXPORT]))
async def list_exports(job: VisibleJob, transaction: InTransaction) -> tuple[ExportView, ...]:
    """The exports of a job, with what came of them."""
    rows = await repository.exports_of(transaction.session, [job.id])
    return tuple(map(ExportView.model_validate, rows))


@router.get("/{export_id}", responses=examples.shown(examples.EXPORT))
async def get_export(job: VisibleJob, export_id: str, transaction: InTransaction) -> ExportView:
    """One export."""
    row = await repository.get(transaction.session, job.id, export_id)
    if row is None:
        raise NotFound(f"job {job.id!r} has no export {export_id!r}")
    return ExportView.model_validate(row)
