"""Lists are read a page at a time, newest first; the position of a page is an arrival."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select
from sqlalchemy.ext.asyncio import AsyncSession


async def newest_first(
    session: AsyncSession, query: Select[Any], arrival: Any, *, before: int | None, limit: int
) -> Sequence[Any]:
    """The rows of a query that arrived before a position."""
    if before is not None:
        query = query.where(arrival < before)
    return (await session.scalars(query.order_by(arrival.desc()).limit(limit))).all()


def next_cursor(rows: Sequence[Any], limit: int) -> str | None:
    """Where the page after a full one begins."""
    return str(rows[-1].arrival) if len(rows) == limit else None
