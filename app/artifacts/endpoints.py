"""`/jobs/{id}/artifacts`: list and download."""

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from app import examples
from app.artifacts import repository
from app.artifacts.archive import stream_tar
from app.artifacts.download import answer
from app.dependencies import InTransaction, Parts, VisibleJob
from app.exceptions import NotFound
from app.gate import ApiRouter
from dressage.spec.artifact import Artifact, ArtifactKind

router = ApiRouter(prefix="/jobs/{job_id}/artifacts", tags=["artifacts"])


@router.get("", responses=examples.shown([examples.ARTIFACT]))
async def list_artifacts(job: VisibleJob, transaction: InTransaction) -> tuple[Artifact, ...]:
    """The files of a job, with checksums."""
    rows = await repository.artifacts_of(transaction.session, [job.id])
    return tuple(map(Artifact.model_validate, rows))


@router.get(
    ".tar",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"application/x-tar": {"schema": {"format": "binary"}}},
            "description": "A tar, made while it is sent.",
        }
    },
)
async def download_archive(
    job: VisibleJob,
    transaction: InTransaction,
    parts: Parts,
    kind: Annotated[list[ArtifactKind] | None, Query(description="All unless given.")] = None,
) -> StreamingResponse:
    """Download all files of a job, or those of some kinds, as one tar."""
    rows = await repository.artifacts_of(transaction.session, [job.id])
    chosen = [row for row in rows if kind is None or row.kind in kind]
    if not chosen:
        raise NotFound(f"job {job.id!r} has no such files")
    return StreamingResponse(
        stream_tar(parts.storage, chosen),
        media_type="application/x-tar",
        headers={"Content-Disposition": f'attachment; filename="{job.id}.tar"'},
    )


@router.get(
    "/{name}",
    response_class=Response,
    responses={
        200: {
            "content": {"application/octet-stream": {"schema": {"format": "binary"}}},
            "description": "The file. `X-Checksum-Sha256` is its checksum; a range is served.",
        },
        206: {"description": "The range that was asked for."},
        304: {"description": "It is the one with your `If-None-Match`."},
        307: {"description": "The file lies in a bucket: follow, without your API key."},
        416: {"description": "There is no such range."},
    },
)
async def download_artifact(
    job: VisibleJob, name: str, request: Request, transaction: InTransaction, parts: Parts
) -> Response:
    """Download a file, whole or by HTTP range. Follow redirects: `curl --location`."""
    row = await repository.get(transaction.session, job.id, name)
    if row is None:
        raise NotFound(f"job {job.id!r} has no file {name!r}")
    return await answer(request, parts.storage, row)
