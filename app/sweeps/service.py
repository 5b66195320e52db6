"""Submit a grid of jobs: all of them, or none."""

from collections.abc import Sequence

import pydantic
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.broker.wake import PendingWakes
from app.db.base import new_id, visible
from app.db.models import JobRow, SweepRow
from app.db.paging import newest_first
from app.exceptions import FieldProblem, IdempotencyKeyReused, JobInvalid, NotFound
from app.jobs import service as jobs
from app.jobs.admission import admit
from app.policy import AdmissionPolicy
from app.sweeps.table import arms
from dressage.spec.job import JobSpec
from dressage.spec.sweep import Sweep, SweepSpec
from dressage.spec.team import Role


async def submit(
    session: AsyncSession,
    wakes: PendingWakes,
    policy: AdmissionPolicy,
    spec: SweepSpec,
    *,
    team: str,
    role: Role,
    idempotency_key: str | None,
) -> tuple[SweepRow, bool]:
    """Store a sweep with its jobs, in one transaction. Returns it, and whether it is new.

    Raises:
        JobInvalid: Any of them cannot run; the fields say which values are to blame.
        IdempotencyKeyReused: The key came with another body before.
    """
    request_hash = jobs.hash_of(spec)
    stored = await session.scalar(
        insert(SweepRow)
        .values(
            id=new_id("sweep"),
            team=team,
            name=spec.name,
            grid=spec.grid,
            idempotency_key=idempotency_key,
            request_hash=request_hash,
        )
        .on_conflict_do_nothing(index_elements=["team", "idempotency_key"])
        .returning(SweepRow)
    )
    if stored is None:
        known = (
            await session.scalars(
                select(SweepRow).where(
                    SweepRow.team == team, SweepRow.idempotency_key == idempotency_key
                )
            )
        ).one()
        if known.request_hash != request_hash:
            raise IdempotencyKeyReused(
                f"this Idempotency-Key created sweep {known.id} from another body; use a new key"
            )
        return known, False
    row: SweepRow = stored
    for point in spec.points():
        job, _ = await jobs.submit(
            session,
            wakes,
            policy,
            team=team,
            requested=_job(spec, point),
            idempotency_key=None,
            role=role,
        )
        job.sweep_id, job.arm = row.id, point
    await session.flush()
    await session.refresh(row)
    return row, True


async def check(
    session: AsyncSession, policy: AdmissionPolicy, spec: SweepSpec, *, team: str, role: Role
) -> int:
    """Check every job of a sweep, and store nothing. Returns how many there would be.

    Raises:
        JobInvalid: Any of them cannot run.
    """
    points = spec.points()
    for point in points:
        await admit(session, team, _job(spec, point), policy, role)
    return len(points)


async def find(session: AsyncSession, team: str | None, sweep_id: str) -> SweepRow:
    """A team's sweep.

    Raises:
        NotFound: There is no such sweep.
    """
    row: SweepRow | None = await session.scalar(
        select(SweepRow).where(SweepRow.id == sweep_id, visible(SweepRow.team, team))
    )
    if row is None:
        raise NotFound(f"there is no sweep {sweep_id!r}")
    return row


async def page(
    session: AsyncSession, team: str | None, *, before: int | None, limit: int
) -> Sequence[SweepRow]:
    """Sweeps of a team, newest first."""
    query = select(SweepRow).where(visible(SweepRow.team, team))
    return await newest_first(session, query, SweepRow.arrival, before=before, limit=limit)


async def show(session: AsyncSession, row: SweepRow) -> Sweep:
    """A sweep with its table."""
    members = await session.scalars(
        select(JobRow).where(JobRow.sweep_id == row.id).order_by(JobRow.arrival)
    )
    return Sweep(
        id=row.id,
        team=row.team,
        name=row.name,
        grid=row.grid,
        arms=arms(members),
        created_at=row.created_at,
    )


def _job(spec: SweepSpec, point: dict[str, object]) -> JobSpec:
    try:
        return JobSpec.model_validate(spec.job(point))
    except pydantic.ValidationError as error:
        problems = [
            FieldProblem(
                field=".".join(map(str, ("base", *found["loc"]))),
                message=f"{found['msg'].removeprefix('Value error, ')} (with {point})",
            )
            for found in error.errors()
        ]
    except ValueError as error:
        problems = [FieldProblem(field="grid", message=str(error))]
    raise JobInvalid.of(problems)
