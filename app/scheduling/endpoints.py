"""`/queue`: what waits, in order of rank, and why."""

from app import examples
from app.dependencies import InTransaction, VisibleTeam
from app.gate import ApiRouter
from app.scheduling import explain
from dressage.spec.queue import QueueState

router = ApiRouter(prefix="/queue", tags=["queue"])


@router.get("", responses=examples.shown(examples.QUEUE))
async def get_queue(transaction: InTransaction, team: VisibleTeam) -> QueueState:
    """Everything that waits, in order of rank: why, and until about when."""
    return await explain.queue_state(transaction.session, team)
