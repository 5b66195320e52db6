"""`/jobs/{id}/artifacts`: list and download."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from app import examples
from app.artifacts import repository
from app.artifacts.archive import stream_tar
from app.artifacts.download import answer
from app.db.models import ArtifactRow
from app.dependencies import InTransaction, Parts, Scope, Transaction
from app.exceptions import NotFound
from app.jobs import repository as jobs
from dressage.spec.artifact import Artifact, ArtifactKind

router = APIRouter(prefix="/jobs/{job_id}/artifacts", tags=["artifacts"])


@router.get("", responses=examples.shown([examples.ARTIFACT]))
async def list_artifacts(
    job_id: str, transaction: InTransaction, team: Scope
) -> tuple[Artifact, ...]:
    """The files of a job, with checksums."""
    rows = await _files_of(transaction, team, job_id)
    return tuple(map(repository.artifact_view, rows))


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
    job_id: str,
    transaction: InTransaction,
    team: Scope,
    parts: Parts,
    kind: Annotated[list[ArtifactKind] | None, Query(description="All unless given.")] = None,
) -> StreamingResponse:
    """Download all files of a job, or those of some kinds, as one tar."""
    rows = await _files_of(transaction, team, job_id)
    chosen = [row for row in rows if kind is None or row.kind in kind]
    if not chosen:
        raise NotFound(f"job {job_id!r} has no such files")
    return StreamingResponse(
        stream_tar(parts.storage, chosen),
        media_type="application/x-tar",
        headers={"Content-Disposition": f'attachment; filename="{job_id}.tar"'},
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
    job_id: str, name: str, request: Request, transaction: InTransaction, team: Scope, parts: Parts
) -> Response:
    """Download a file, whole or by HTTP range. Follow redirects: `curl --location`."""
    job = await jobs.get(transaction.session, team, job_id)
    row = await repository.get(transaction.session, job.id, name) if job else None
    if row is None:
        raise NotFound(f"job {job_id!r} has no file {name!r}")
    return await answer(request, parts.storage, row)


async def _files_of(
    transaction: Transaction, team: str | None, job_id: str
) -> Sequence[ArtifactRow]:
    if await jobs.get(transaction.session, team, job_id) is None:
        raise NotFound(f"there is no job {job_id!r}")
    return await jobs.artifacts_of(transaction.session, [job_id])
