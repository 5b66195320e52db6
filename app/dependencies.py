"""What endpoints are given: who asks, one transaction a request, the parts of the service."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import structlog
from celery import Celery
from fastapi import Depends, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import ORMExecuteState, Session, UOWTransaction

from app.auth import audit
from app.auth.keys import Caller, KeyCache
from app.auth.limits import RateLimiter, RefusalLimiter
from app.broker.wake import PendingWakes, wake
from app.db.engine import Sessions, unit_of_work
from app.db.models import JobRow
from app.egress import AllowedAddresses
from app.exceptions import InvalidRequest, NotAllowed, NotFound, Unauthorized
from app.lifecycle.jobs import find_job
from app.policy import AdmissionPolicy
from app.pools import TeamPool
from app.storage import Storage
from dressage.spec.team import Role

log = structlog.get_logger()

# The small ones are async, too: FastAPI sends every other one through a thread.
READS = ("GET", "HEAD")
bearer = HTTPBearer(auto_error=False, description="An API key: `drs_…`")


@dataclass(frozen=True)
class Services:
    """Built once at start; lives in `request.app.state.services`."""

    sessions: Sessions
    key_cache: KeyCache
    limiter: RateLimiter
    refusals: RefusalLimiter
    celery: Celery
    storage: Storage
    policy: AdmissionPolicy
    allowed_addresses: AllowedAddresses
    max_upload_bytes: int
    previews: TeamPool
    uploads: TeamPool


async def services(request: Request) -> Services:
    """The parts of the service."""
    found: Services = request.app.state.services
    return found


def key_in(request: Request) -> str:
    """The API key that a request comes with; empty without one."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


async def identify(request: Request) -> Caller:
    """Who sends this request, found once.

    Raises:
        Unauthorized: There is no key, or not a valid one.
        TooManyRequests: Its address has sent too many of those.
    """
    known: Caller | None = getattr(request.state, "caller", None)
    if known:
        return known
    parts, given = await services(request), key_in(request)
    caller = await parts.key_cache.identify(given) if given else None
    if caller is None:
        address = request.client.host if request.client else ""
        log.warning("auth.refused", address=address, path=request.url.path, key=given[:8] or None)
        parts.refusals.count(address)
        raise Unauthorized(
            "send a valid API key: `Authorization: Bearer drs_…`; an operator makes one with "
            "`dressage keys create`"
        )
    request.state.caller = caller
    return caller


async def current_caller(
    request: Request,
    parts: Annotated[Services, Depends(services)],
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],  # shown in the docs
) -> Caller:
    """The caller, by the key in the request.

    Raises:
        Unauthorized: There is no key, or not a valid one.
        NotAllowed: A viewer wants to change something.
        TooManyRequests: The key has asked too often.
    """
    caller = await identify(request)
    parts.limiter.count(caller)
    if caller.role is Role.VIEWER and request.method not in READS:
        raise NotAllowed("this key is a viewer's: it may look, but change nothing")
    return caller


CurrentCaller = Annotated[Caller, Depends(current_caller)]


async def operator(caller: CurrentCaller) -> None:
    """Only who runs the service.

    Raises:
        NotAllowed: The key has another role.
    """
    if caller.role is not Role.OPERATOR:
        raise NotAllowed("only an operator's key may do this")


async def visible_team(caller: CurrentCaller) -> str | None:
    """The team whose things the caller sees; None: every team's."""
    return caller.visible_team


async def team(caller: CurrentCaller) -> str:
    """The team that new things belong to."""
    return caller.team


class Transaction:
    """A session, who changes something in it, and whom to wake once it is committed."""

    def __init__(self, session: AsyncSession, celery: Celery, note: Callable[[], None]) -> None:
        self.session, self.wakes = session, PendingWakes()
        self._celery, self._note = celery, note
        self._changed = self._noted = False
        event.listen(session.sync_session, "after_flush", self._flushed)
        event.listen(session.sync_session, "do_orm_execute", self._executed)

    async def note(self) -> None:
        """Write down that something was stored, in the transaction that stores it."""
        await self.session.flush()
        if self._changed and not self._noted:
            self._noted = True
            self._note()

    def _flushed(self, session: Session, _: UOWTransaction) -> None:
        self._changed |= bool(session.new or session.dirty or session.deleted)

    def _executed(self, state: ORMExecuteState) -> Any:
        if not (state.is_insert or state.is_update or state.is_delete):
            return None
        result = state.invoke_statement()
        self._changed |= getattr(result, "rowcount", 1) != 0
        return result

    def wake(self) -> None:
        """Wake the workers for what is committed."""
        for queue in self.wakes.take():
            wake(self._celery, queue)

    async def commit(self) -> None:
        """Commit before the answer is ready; nothing can be written after it."""
        await self.note()
        await self.session.commit()
        self.wake()


async def transaction(
    request: Request,
    response: Response,
    services: Annotated[Services, Depends(services)],
    caller: CurrentCaller,
) -> AsyncIterator[Transaction]:
    """One transaction for one request, committed before the answer is sent.

    What it stores is written down in it, with who did it, whatever the request says of itself.
    """

    def note() -> None:
        audit.note(
            session,
            caller,
            action=f"{request.method} {request.scope['route'].path}",
            target=response.headers.get("location", request.url.path),
        )

    async with unit_of_work(services.sessions) as session:
        given = Transaction(session, services.celery, note)
        yield given
        await given.note()
    given.wake()


async def cursor_position(
    cursor: Annotated[str | None, Query(description="From `next_cursor`.")] = None,
) -> int | None:
    """Where a page begins."""
    if cursor is None:
        return None
    if not cursor.isdecimal() or len(cursor) > 18:
        raise InvalidRequest("cursor: pass the next_cursor of the page before")
    return int(cursor)


InTransaction = Annotated[Transaction, Depends(transaction, scope="function")]
OperatorOnly = Depends(operator)
VisibleTeam = Annotated[str | None, Depends(visible_team)]
Team = Annotated[str, Depends(team)]
Parts = Annotated[Services, Depends(services)]
Position = Annotated[int | None, Depends(cursor_position)]
Limit = Annotated[int, Query(ge=1, le=200)]


async def visible_job(job_id: str, transaction: InTransaction, team: VisibleTeam) -> JobRow:
    """The job of the path.

    Raises:
        NotFound: There is no such job, or it is another team's.
    """
    job = await find_job(transaction.session, team, job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id!r}")
    return job


VisibleJob = Annotated[JobRow, Depends(visible_job)]
