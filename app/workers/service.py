"""Workers as the service shows them, and their states."""

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import AttemptRow, WorkerRow
from app.exceptions import NotFound
from app.workers import repository
from dressage.spec.queue import Worker
from dressage.spec.status import AttemptKind, WorkerState


async def every(session: AsyncSession, team: str | None) -> tuple[Worker, ...]:
    """All workers; of what they run, what a team (None: an operator) may see."""
    running = await repository.running(session, team)
    return tuple(_shown(row, running) for row in await repository.every(session))


async def switch_state(
    session: AsyncSession, worker_id: str, state: WorkerState, reason: str | None
) -> Worker:
    """Change whether a worker takes work.

    Raises:
        NotFound: There is no such worker.
    """
    row = await repository.get(session, worker_id)
    if row is None:
        raise NotFound(f"there is no worker {worker_id!r}")
    row.state, row.state_reason = state, reason
    return _shown(row, await repository.running(session, None))


def _shown(row: WorkerRow, running: Sequence[AttemptRow]) -> Worker:
    own = [attempt for attempt in running if attempt.worker_id == row.id]
    changes: dict[str, object] = {
        "jobs": tuple(a.work_id for a in own if a.kind == AttemptKind.TRAIN),
        "exports": tuple(a.work_id for a in own if a.kind != AttemptKind.TRAIN),
    }
    if row.heartbeat_at < datetime.now(UTC) - repository.WORKER_SILENT_AFTER:
        changes |= {"state": "silent", "state_reason": "no heartbeat for a while"}
    return Worker.model_validate(row).model_copy(update=changes)
