"""`/teams` and `/usage`."""

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Body, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import AwareDatetime

from app import examples
from app.dependencies import InTransaction, OperatorOnly, VisibleTeam
from app.exceptions import InvalidRequest
from app.gate import ApiRouter
from app.teams import service
from dressage.spec.team import (
    Team,
    TeamChanges,
    TeamLimits,
    TeamName,
    Usage,
    UsageBy,
    UsageRow,
)

router = ApiRouter(tags=["teams"])
EARLIEST, LATEST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
LONGEST_REPORT = timedelta(days=400)


@router.get("/teams", responses=examples.shown([examples.TEAM]))
async def list_teams(transaction: InTransaction, team: VisibleTeam) -> tuple[Team, ...]:
    """Teams with their limits and what they use now."""
    return tuple(await service.every(transaction.session, team))


@router.get("/teams/{name}", responses=examples.shown(examples.TEAM))
async def get_team(name: str, transaction: InTransaction, team: VisibleTeam) -> Team:
    """One team."""
    row = await service.find(transaction.session, team, name)
    return await service.view(transaction.session, row)


@router.put(
    "/teams/{name}",
    dependencies=[OperatorOnly],
    responses={
        201: {"model": Team, "description": "It is new."},
        **examples.shown(examples.TEAM),
    },
)
async def put_team(
    name: Annotated[TeamName, Path()],
    limits: Annotated[TeamLimits, Body(openapi_examples={"limits": {"value": examples.LIMITS}})],
    transaction: InTransaction,
    response: Response,
) -> Team:
    """Make a team, or give it other limits; what is left out has no limit."""
    row, is_new = await service.put(transaction.session, name, limits)
    response.status_code = 201 if is_new else 200
    return await service.view(transaction.session, row)


@router.patch(
    "/teams/{name}",
    dependencies=[OperatorOnly],
    responses=examples.shown(examples.TEAM),
)
async def patch_team(
    name: str,
    changes: Annotated[
        TeamChanges, Body(openapi_examples={"more": {"value": {"max_queued_jobs": 50}}})
    ],
    transaction: InTransaction,
) -> Team:
    """Change some limits of a team; null takes one away, what is left out stays."""
    row = await service.find(transaction.session, None, name)
    limits = TeamLimits.model_validate(row).model_copy(
        update=changes.model_dump(exclude_unset=True)
    )
    row, _ = await service.put(transaction.session, name, limits)
    return await service.view(transaction.session, row)


@router.get(
    "/usage",
    response_model=Usage,
    responses={
        200: {
            "content": {
                "application/json": {"example": examples.USAGE},
                "text/csv": {"schema": {"type": "string"}},
            }
        }
    },
)
async def get_usage(
    request: Request,
    transaction: InTransaction,
    team: VisibleTeam,
    since: Annotated[AwareDatetime | None, Query(description="30 days ago unless given.")] = None,
    until: Annotated[AwareDatetime | None, Query(description="Now unless given.")] = None,
    by: UsageBy = UsageBy.TEAM,
) -> Usage | PlainTextResponse:
    """GPU time of a period, as JSON or (`Accept: text/csv`) as CSV."""
    until = until or datetime.now(UTC)
    for name, time in (("since", since), ("until", until)):
        if time and not EARLIEST <= time <= LATEST:
            raise InvalidRequest(f"{name}: give a time between {EARLIEST:%Y} and {LATEST:%Y}")
    since = since or until - timedelta(days=30)
    if not since < until <= since + LONGEST_REPORT:
        raise InvalidRequest(f"since must be before until, by {LONGEST_REPORT.days} days at most")
    rows = await service.usage(transaction.session, team, since=since, until=until, by=by)
    if "text/csv" in request.headers.get("accept", ""):
        return PlainTextResponse(_csv(rows), media_type="text/csv")
    return Usage(since=since, until=until, items=tuple(rows))


def _csv(rows: list[UsageRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(UsageRow.model_fields))
    writer.writeheader()
    writer.writerows(row.model_dump() for row in rows)
    return text.getvalue()
