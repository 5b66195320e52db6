"""`/sweeps`: matched jobs over seeds and values, and their table."""

from typing import Annotated

from fastapi import Body, Header, Query, Response

from app import examples
from app.db.paging import next_cursor
from app.dependencies import CurrentCaller, InTransaction, Limit, Parts, Position, VisibleTeam
from app.gate import ApiRouter
from app.sweeps import service
from dressage.spec.sweep import Sweep, SweepDryRun, SweepPage, SweepSpec

router = ApiRouter(prefix="/sweeps", tags=["sweeps"])


@router.post(
    "",
    status_code=201,
    response_model=Sweep | SweepDryRun,
    responses={
        200: {"model": Sweep | SweepDryRun, "description": "Dry run, or a repeated key."},
        **examples.shown(examples.SWEEP, 201),
    },
)
async def submit_sweep(
    spec: Annotated[SweepSpec, Body(openapi_examples={"seeds": {"value": examples.SWEEP_SPEC}})],
    transaction: InTransaction,
    caller: CurrentCaller,
    parts: Parts,
    response: Response,
    dry_run: Annotated[bool, Query(description="Check everything, store nothing.")] = False,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Sweep | SweepDryRun:
    """Put a job into the queue for every combination: all of them, or none."""
    if dry_run:
        response.status_code = 200
        jobs = await service.check(
            transaction.session, parts.policy, spec, team=caller.team, role=caller.role
        )
        return SweepDryRun(jobs=jobs)
    row, is_new = await service.submit(
        transaction.session,
        transaction.wakes,
        parts.policy,
        spec,
        team=caller.team,
        role=caller.role,
        idempotency_key=idempotency_key,
    )
    response.status_code = 201 if is_new else 200
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
