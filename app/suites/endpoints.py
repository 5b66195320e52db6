"""`/suites`: upload, look and delete."""

import asyncio
import tempfile
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response

from app import examples
from app.auth.keys import Caller
from app.db.models import SuiteRow
from app.db.paging import next_cursor
from app.dependencies import (
    CurrentCaller,
    InTransaction,
    Limit,
    Parts,
    Position,
    Team,
    Transaction,
    VisibleTeam,
)
from app.exceptions import InvalidRequest, NotFound
from app.gate import ApiRouter
from app.suites import repository, service
from dressage.authoring.suite import FieldMapping
from dressage.spec.suite import CasePage, SuiteInfo, SuitePage

router = ApiRouter(prefix="/suites", tags=["suites"])

SUITE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
Reference = Annotated[str, Path(description="A suite id, `name@version`, or `name` (the newest).")]
UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The file as it is: JSONL, JSON, CSV (say `Content-Type: text/csv`), zip or "
        "tar. An archive has `cases.jsonl` and Python files at its top.",
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "text/csv": {"schema": {"type": "string"}},
        },
    }
}


@router.post(
    "",
    status_code=201,
    openapi_extra=UPLOAD,
    responses={
        200: {"model": SuiteInfo, "description": "This content is stored already."},
        **examples.shown(examples.SUITE, 201),
    },
)
async def upload_suite(
    request: Request,
    response: Response,
    transaction: InTransaction,
    team: Team,
    parts: Parts,
    name: Annotated[str, Query(pattern=SUITE_NAME, examples=["arithmetic"])],
    input_field: Annotated[
        str | None, Query(description="For foreign datasets: the column that becomes `input`.")
    ] = None,
    expect_fields: Annotated[
        list[str] | None, Query(description="Columns collected into `expect`.")
    ] = None,
) -> SuiteInfo:
    """Store a suite as the next version of its name; the same content is the same version."""
    mapping = FieldMapping(input_field, tuple(expect_fields or ())) if input_field else None
    content_type = request.headers.get("content-type", "")
    if content_type.startswith("multipart/"):
        raise InvalidRequest(
            "send the file itself as the body (curl --data-binary @cases.jsonl), not as a form"
        )
    csv_text = content_type.startswith("text/csv")
    with tempfile.TemporaryFile() as upload:
        await service.receive(
            request.stream(),
            upload,
            announced=_announced(request),
            limit=parts.max_upload_bytes,
        )
        row, is_new = await service.store(
            transaction.session,
            parts.sessions,
            parts.storage,
            parts.uploads,
            team=team,
            name=name,
            upload=upload,
            csv_text=csv_text,
            mapping=mapping,
        )
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"/suites/{row.id}"
    return SuiteInfo.model_validate(row)


@router.get("", responses=examples.shown(examples.page(examples.SUITE)))
async def list_suites(
    transaction: InTransaction,
    team: VisibleTeam,
    position: Position,
    name: str | None = None,
    limit: Limit = 50,
) -> SuitePage:
    """Suites, newest first."""
    rows = await repository.page(transaction.session, team, name=name, before=position, limit=limit)
    return SuitePage(
        items=tuple(map(SuiteInfo.model_validate, rows)), next_cursor=next_cursor(rows, limit)
    )


@router.get("/{reference}", responses=examples.shown(examples.SUITE))
async def get_suite(
    reference: Reference, transaction: InTransaction, caller: CurrentCaller
) -> SuiteInfo:
    """One suite, with the tools and measures found in its code."""
    return SuiteInfo.model_validate(await _existing(transaction, caller, reference))


@router.get("/{reference}/cases", responses=examples.shown(examples.page(examples.CASE, "50")))
async def list_cases(
    reference: Reference,
    transaction: InTransaction,
    caller: CurrentCaller,
    parts: Parts,
    position: Position,
    limit: Limit = 50,
) -> CasePage:
    """The cases of a suite, in order."""
    row = await _existing(transaction, caller, reference)
    start = position or 0
    items = await asyncio.to_thread(service.read_cases, parts.storage, row, start, limit)
    more = start + limit < row.case_count
    return CasePage(items=tuple(items), next_cursor=str(start + limit) if more else None)


@router.delete("/{reference}", status_code=204)
async def delete_suite(
    reference: Reference, transaction: InTransaction, caller: CurrentCaller
) -> Response:
    """Remove a version that no job uses. Its number is not given again."""
    await service.delete(transaction.session, await _existing(transaction, caller, reference))
    return Response(status_code=204)


async def _existing(transaction: Transaction, caller: Caller, reference: str) -> SuiteRow:
    row = await repository.by_id(transaction.session, caller.visible_team, reference)
    row = row or await repository.find(transaction.session, caller.team, reference)
    if row is None:
        raise NotFound(f"there is no suite {reference!r}")
    return row


def _announced(request: Request) -> int | None:
    length = request.headers.get("content-length")
    if length is None:
        return None
    if not length.isdecimal():
        raise InvalidRequest("Content-Length must be a number")
    return int(length)
