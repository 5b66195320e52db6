"""Queries on suites."""

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import visible
from app.db.models import JobRow, SuiteNameRow, SuiteRow
from app.db.paging import newest_first


async def by_id(session: AsyncSession, team: str | None, suite_id: str) -> SuiteRow | None:
    """A suite that a team (None: an operator) may see."""
    found: SuiteRow | None = await session.scalar(
        select(SuiteRow).where(SuiteRow.id == suite_id, visible(SuiteRow.team, team))
    )
    return found


async def find(session: AsyncSession, team: str, reference: str) -> SuiteRow | None:
    """A suite by id, by `name@version`, or the newest version of a name."""
    query = select(SuiteRow).where(SuiteRow.team == team)
    name, at, version = reference.partition("@")
    if reference.startswith("suite_"):
        query = query.where(SuiteRow.id == reference)
    elif at and version.isdecimal() and len(version) < 9:
        query = query.where(SuiteRow.name == name, SuiteRow.version == int(version))
    elif at:
        return None
    else:
        query = query.where(SuiteRow.name == name)
    found: SuiteRow | None = await session.scalar(query.order_by(SuiteRow.version.desc()).limit(1))
    return found


async def same_content(
    session: AsyncSession, team: str, name: str, content_hash: str
) -> SuiteRow | None:
    """The version of a name that has this content."""
    found: SuiteRow | None = await session.scalar(
        select(SuiteRow).where(
            SuiteRow.team == team, SuiteRow.name == name, SuiteRow.content_hash == content_hash
        )
    )
    return found


async def lock_name(session: AsyncSession, team: str, name: str) -> SuiteNameRow:
    """A suite's name, made if it is new; other uploads of it wait."""
    known = await session.get(SuiteNameRow, (team, name), with_for_update=True)
    if known:
        return known
    new = insert(SuiteNameRow).values(team=team, name=name, versions=0)
    await session.execute(new.on_conflict_do_nothing())
    return await session.get_one(SuiteNameRow, (team, name), with_for_update=True)


async def hold(session: AsyncSession, suite_id: str) -> bool:
    """Keep a suite from being deleted until the end of the transaction. False: it is gone."""
    query = select(SuiteRow.id).where(SuiteRow.id == suite_id)
    found = await session.scalar(query.with_for_update(key_share=True, read=True))
    return found is not None


async def jobs_of(session: AsyncSession, suite_id: str) -> int:
    """How many jobs use a suite, ended ones included."""
    query = select(func.count()).select_from(JobRow).where(JobRow.suite_id == suite_id)
    return await session.scalar(query) or 0


async def page(
    session: AsyncSession, team: str | None, *, name: str | None, before: int | None, limit: int
) -> Sequence[SuiteRow]:
    """Suites of a team, newest first."""
    query = select(SuiteRow).where(visible(SuiteRow.team, team))
    if name:
        query = query.where(SuiteRow.name == name)
    return await newest_first(session, query, SuiteRow.arrival, before=before, limit=limit)
