"""`/sweeps`: matched jobs over seeds and values, and their table."""

from typing import Annotated

from fastapi import Body, Response

from app import examples
from app.db.paging import next_cursor
from app.dependencies import InTransaction, Limit, Parts, Position, Team, VisibleTeam
from app.gate import ApiRouter
from app.sweeps import service
from dressage.spec.sweep import Sweep, SweepPage, SweepSpec

router = ApiRouter(prefix="/sweeps", tags=["sweeps"])


@router.post("", status_code=201, responses=examples.shown(examples.SWEEP, 201))
async def submit_sweep(
    spec: Annotated[SweepSpec, Body(openapi_examples={"seeds": {"value": examples.SWEEP_SPEC}})],
    transaction: InTransaction,
    team: Team,
    parts: Parts,
    response: Response,
) -> Sweep:
    """Put a job into the queue for every combination: all of them, or none."""
    row = await service.submit(transaction.session, transaction.wakes, parts.policy, team, spec)
    response.headers["Location"] = f"/sweeps/{row.id}"
    return await service.show(transaction.session, row)


@router.get("", responses=examples.shown(examples.page(examples.SWEEP)))
async def list_sweeps(
    transaction: InTransaction, team: VisibleTeam, position: Position, limit: Limit = 50
) -> SweepPage:
    """Sweeps, newest first."""
    rows = await service.page(transaction.session, team, before=position, limit=limit)
    items = [await service.show(transaction.session, row) for row in rows]
    return SweepPage(items=tuple(items), next_cursor=next_cursor(rows, limit))


@router.get("/{sweep_id}", responses=examples.shown(examples.SWEEP))
async def get_sweep(sweep_id: str, transaction: InTransaction, team: VisibleTeam) -> Sweep:
    """One sweep, with mean and interval for each arm."""
    return await service.show(
        transaction.session, await service.find(transaction.session, team, sweep_id)
    )
