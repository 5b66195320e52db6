"""`/workers` and `/queue`: what there is to run jobs, and what waits for it."""

from datetime import UTC, datetime

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession

from app import examples
from app.db.models import WorkerRow
from app.dependencies import InTransaction, OperatorOnly, Scope
from app.exceptions import NotFound
from app.queue import explain
from app.queue.plan import WorkerState
from app.workers import repository
from dressage.spec.queue import QueueState, Worker

router = APIRouter()


@router.get("/queue", tags=["queue"], responses=examples.shown(examples.QUEUE))
async def get_queue(transaction: InTransaction, scope: Scope) -> QueueState:
    """Everything that waits, in order of standing: why, and until about when."""
    return await explain.queue_state(transaction.session, scope)


@router.get("/workers", tags=["workers"], responses=examples.shown([examples.WORKER]))
async def list_workers(transaction: InTransaction, scope: Scope) -> tuple[Worker, ...]:
    """Workers with their GPUs, and what they run."""
    jobs = await repository.running_on(transaction.session, scope)
    rows = await repository.every(transaction.session)
    return tuple(_view(row, jobs.get(row.id, [])) for row in rows)


@router.post(
    "/workers/{worker_id}/drain",
    tags=["workers"],
    dependencies=[OperatorOnly],
    responses=examples.shown({**examples.WORKER, "state": "draining"}),
)
async def drain_worker(worker_id: str, transaction: InTransaction) -> Worker:
    """Let a worker finish what it runs, and take nothing new."""
    reason = "drained by an operator"
    return await _switch(transaction.session, worker_id, WorkerState.DRAINING, reason)


@router.post(
    "/workers/{worker_id}/activate",
    tags=["workers"],
    dependencies=[OperatorOnly],
    responses=examples.shown(examples.WORKER),
)
async def activate_worker(worker_id: str, transaction: InTransaction) -> Worker:
    """Let a drained or sick worker take jobs again."""
    return await _switch(transaction.session, worker_id, WorkerState.ACTIVE, None)


async def _switch(
    session: AsyncSession, worker_id: str, state: WorkerState, reason: str | None
) -> Worker:
    row = await repository.get(session, worker_id)
    if row is None:
        raise NotFound(f"there is no worker {worker_id!r}")
    row.state, row.state_reason = state, reason
    jobs = await repository.running_on(session, None)
    return _view(row, jobs.get(row.id, []))


def _view(row: WorkerRow, jobs: list[str]) -> Worker:
    silent = row.heartbeat_at < datetime.now(UTC) - repository.WORKER_SILENT_AFTER
    return Worker(
        id=row.id,
        hostname=row.hostname,
        queue=row.queue,
        gpus=row.gpus,
        gpu_type=row.gpu_type,
        gpu_memory_gb=row.gpu_memory_gb,
        labels=tuple(row.labels),
        versions=row.versions,
        state="silent" if silent else row.state,
        state_reason="no heartbeat for a while" if silent else row.state_reason,
        jobs=tuple(jobs),
        started_at=row.started_at,
        heartbeat_at=row.heartbeat_at,
    )
