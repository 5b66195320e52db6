"""One file as an HTTP answer: whole, a range of it, or where else it is."""

import re
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from app.db.models import ArtifactRow
from app.exceptions import RangeNotSatisfiable
from app.storage import Storage

ONE_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


@dataclass(frozen=True)
class Range:
    """Bytes from `start` up to `end`."""

    start: int
    end: int


async def answer(request: Request, storage: Storage, row: ArtifactRow) -> Response:
    """The file, a piece at a time: the memory is that of one piece.

    Raises:
        RangeNotSatisfiable: It ends before the range begins.
    """
    tag = f'"{row.sha256}"'
    headers = {
        "ETag": tag,
        "X-Checksum-Sha256": row.sha256,
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="{row.name}"',
    }
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    link = await storage.link(row.sha256)
    if link:
        return RedirectResponse(link, status_code=307, headers=headers)
    wanted = None
    if request.headers.get("if-range", tag) == tag:
        wanted = asked_range(request.headers.get("range", ""), row.size)
    given = wanted or Range(0, row.size)
    if wanted:
        headers["Content-Range"] = f"bytes {given.start}-{given.end - 1}/{row.size}"
    return StreamingResponse(
        storage.stream(row.sha256, given.start, given.end),
        status_code=206 if wanted else 200,
        media_type="application/octet-stream",
        headers={**headers, "Content-Length": str(given.end - given.start)},
    )


def asked_range(header: str, size: int) -> Range | None:
    """The range of a `Range` header; None: the whole file, as also for what we do not serve.

    Several ranges, other units and nonsense are not served; RFC 9110 lets them be passed over.

    Raises:
        RangeNotSatisfiable: The file ends before it begins.
    """
    found = ONE_RANGE.fullmatch(header.strip())
    first, last = found.groups() if found else ("", "")
    if not first and not last:
        return None
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= size or start >= end:
        raise RangeNotSatisfiable(size)
    return Range(start, end)
