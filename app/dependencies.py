"""What endpoints are given: one transaction a request, the team, the parts of the service."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from celery import Celery
from fastapi import Depends, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import Sessions, unit_of_work
from app.exceptions import InvalidRequest
from app.jobs.rules import OperatorRules
from app.queue.doorbell import Doorbell, ring
from app.storage import Storage

DEFAULT_TEAM = "default"


@dataclass(frozen=True)
class Services:
    """Built once at start; lives in `request.app.state.services`."""

    sessions: Sessions
    celery: Celery
    storage: Storage
    rules: OperatorRules
    max_upload_bytes: int


def services(request: Request) -> Services:
    """The parts of the service."""
    found: Services = request.app.state.services
    return found


@dataclass(frozen=True)
class Transaction:
    """A session, and the rings to send once it is committed."""

    session: AsyncSession
    doorbell: Doorbell
    celery: Celery

    def ring(self) -> None:
        """Send the rings of what is committed."""
        for queue in self.doorbell.take():
            ring(self.celery, queue)


async def transaction(
    services: Annotated[Services, Depends(services)],
) -> AsyncIterator[Transaction]:
    """One transaction for one request, committed before the answer is sent."""
    async with unit_of_work(services.sessions) as session:
        given = Transaction(session, Doorbell(), services.celery)
        yield given
    given.ring()


def team() -> str:
    """The team that asks. One machine without keys has one team."""
    return DEFAULT_TEAM


def cursor_position(
    cursor: Annotated[str | None, Query(description="From `next_cursor`.")] = None,
) -> int | None:
    """Where a page goes on."""
    if cursor is None:
        return None
    if not cursor.isdecimal() or len(cursor) > 18:
        raise InvalidRequest("cursor: pass the next_cursor of the page before")
    return int(cursor)


InTransaction = Annotated[Transaction, Depends(transaction, scope="function")]
Team = Annotated[str, Depends(team)]
Parts = Annotated[Services, Depends(services)]
Position = Annotated[int | None, Depends(cursor_position)]
Limit = Annotated[int, Query(ge=1, le=200)]
