"""`/workers`: what there is to run jobs and exports."""

from app import examples
from app.dependencies import InTransaction, OperatorOnly, VisibleTeam
from app.gate import ApiRouter
from app.workers import service
from dressage.spec.queue import Worker
from dressage.spec.status import WorkerState

router = ApiRouter(prefix="/workers", tags=["workers"])


@router.get("", responses=examples.shown([examples.WORKER]))
async def list_workers(transaction: InTransaction, team: VisibleTeam) -> tuple[Worker, ...]:
    """Workers with their GPUs, and what they run."""
    return await service.every(transaction.session, team)


@router.post(
    "/{worker_id}/drain",
    dependencies=[OperatorOnly],
    responses=examples.shown({**examples.WORKER, "state": "draining"}),
)
async def drain_worker(worker_id: str, transaction: InTransaction) -> Worker:
    """Let a worker finish what it runs, and take nothing new."""
    return await service.switch_state(
        transaction.session, worker_id, WorkerState.DRAINING, "drained by an operator"
    )


@router.post(
    "/{worker_id}/activate",
    dependencies=[OperatorOnly],
    responses=examples.shown(examples.WORKER),
)
async def activate_worker(worker_id: str, transaction: InTransaction) -> Worker:
    """Let a drained or sick worker take jobs again."""
    return await service.switch_state(transaction.session, worker_id, WorkerState.ACTIVE, None)
