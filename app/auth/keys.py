"""API keys: made, found by their secret, revoked. Only hashes are kept."""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import new_id, visible
from app.db.engine import Sessions, unit_of_work
from app.db.models import KeyRow, TeamRow
from app.db.paging import newest_first
from app.exceptions import NotFound
from dressage.spec.team import Key, KeySpec, NewKey, Role

SECRET_PREFIX = "drs_"
SHOWN = len(SECRET_PREFIX) + 8
CACHE_SECONDS = 5.0  # a revoked key is refused after so long at the latest
CACHED_KEYS = 10_000


@dataclass(frozen=True)
class Caller:
    """Whose key a request came with."""

    key_id: str
    team: str
    role: Role
    requests_per_minute: int | None
    expires_at: datetime | None

    @property
    def visible_team(self) -> str | None:
        """The team whose things may be seen; None: every team's."""
        return None if self.role is Role.OPERATOR else self.team


class KeyCache:
    """Finds callers by secret, and remembers them for a few seconds."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._known: dict[str, tuple[Caller | None, float]] = {}

    async def identify(self, secret: str) -> Caller | None:
        """The caller with this secret, unless the key is unknown, revoked or expired."""
        sha256 = _hash(secret)
        caller, until = self._known.get(sha256, (None, 0.0))
        if until < time.monotonic():
            async with unit_of_work(self._sessions) as session:
                caller = await _find(session, sha256)
            if len(self._known) >= CACHED_KEYS:
                self._known.clear()
            self._known[sha256] = (caller, time.monotonic() + CACHE_SECONDS)
        if caller and caller.expires_at and caller.expires_at <= datetime.now(UTC):
            return None
        return caller


async def create(session: AsyncSession, spec: KeySpec) -> NewKey:
    """Make a key. Its secret is in the answer and nowhere else.

    Raises:
        NotFound: There is no such team.
    """
    if await session.get(TeamRow, spec.team) is None:
        raise NotFound(f"there is no team {spec.team!r}; make it with PUT /teams/{spec.team}")
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    row = KeyRow(
        id=new_id("key"),
        **spec.model_dump(),
        prefix=secret[:SHOWN],
        sha256=_hash(secret),
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    return NewKey(**Key.model_validate(row).model_dump(), secret=secret)


async def get(session: AsyncSession, key_id: str) -> KeyRow:
    """A key that is known to be there."""
    return await session.get_one(KeyRow, key_id)


async def page(
    session: AsyncSession, team: str | None, *, before: int | None, limit: int
) -> Sequence[KeyRow]:
    """Keys, newest first."""
    query = select(KeyRow).where(visible(KeyRow.team, team))
    return await newest_first(session, query, KeyRow.arrival, before=before, limit=limit)


async def revoke(session: AsyncSession, key_id: str) -> KeyRow:
    """End a key, for good.

    Raises:
        NotFound: There is no such key.
    """
    row = await session.get(KeyRow, key_id, with_for_update=True)
    if row is None:
        raise NotFound(f"there is no key {key_id!r}")
    row.revoked_at = row.revoked_at or datetime.now(UTC)
    return row


async def any_operator(session: AsyncSession) -> bool:
    """Whether anybody can run the service."""
    found = await session.scalar(
        select(KeyRow.id).where(KeyRow.role == Role.OPERATOR, KeyRow.revoked_at.is_(None)).limit(1)
    )
    return found is not None


async def _find(session: AsyncSession, sha256: str) -> Caller | None:
    row = await session.scalar(
        select(KeyRow).where(KeyRow.sha256 == sha256, KeyRow.revoked_at.is_(None))
    )
    if row is None:
        return None
    return Caller(row.id, row.team, Role(row.role), row.requests_per_minute, row.expires_at)


def _hash(secret: str) -> str:
    # A secret has 256 random bits: nothing to guess, so nothing to slow down.
    return hashlib.sha256(secret.encode()).hexdigest()
