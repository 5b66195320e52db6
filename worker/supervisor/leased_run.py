"""The frame of all leased work: lay out → spawn → watch → settle. Once, for jobs and exports."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import (
    DATABASE_UNAVAILABLE,
    Sessions,
    create_engine,
    create_sessions,
    unit_of_work,
)
from app.db.models import JobRow
from app.lifecycle.jobs import EventDraft
from app.scheduling.leases import Lease, StaleLease, fenced, heartbeat
from dressage.spec.status import JobStatus
from worker.supervisor.context import WorkerContext
from worker.supervisor.outcome import Outcome, outcome_of, read_outcome
from worker.supervisor.process import ChildProcess
from worker.supervisor.relay import has_more, read_events
from worker.supervisor.watch import Ending, patiently, until_stored, watch

log = structlog.get_logger()
T = TypeVar("T")


async def claimed(
    context: WorkerContext, claim: Callable[[AsyncSession], Awaitable[T]]
) -> tuple[Sessions, T | None]:
    """Claim in a transaction of its own. None: the database is away."""
    sessions = create_sessions(create_engine(context.database_url, pooled=False))
    try:
        async with unit_of_work(sessions) as session:
            return sessions, await claim(session)
    except DATABASE_UNAVAILABLE as error:
        log.warning("claim.database", error=str(error).splitlines()[:1])
        return sessions, None


class LeasedRun(ABC):
    """One attempt, from its directory to its end.

    Attributes:
        path: The run directory.
        module: What the child runs.
    """

    path: Path
    module: str

    def __init__(self, context: WorkerContext, sessions: Sessions, lease: Lease) -> None:
        self.context, self.sessions, self.lease = context, sessions, lease
        self._relayed = 0

    async def carry_out(self) -> None:
        """Run it to its end. Whatever hinders that is stored as its failure."""
        named = {"job_id": self.lease.job_id, "work_id": self.lease.work_id}
        with (
            structlog.contextvars.bound_contextvars(**named, attempt=self.lease.attempt),
            contextlib.suppress(StaleLease),  # somebody else's by now: nothing may be written
        ):
            log.info("work.claimed", kind=self.lease.kind)
            try:
                await patiently(self.context, self, self.lay_out)
                await until_stored(self.recover)
                await self._run()
            except StaleLease:
                raise
            except Exception as error:
                log.exception("work.not_settled")
                await self.settle(outcome_of(error))

    @abstractmethod
    def lay_out(self) -> None:
        """Make the run directory. Called again when the store was away."""

    async def recover(self) -> None:
        """Store what earlier attempts could not store; nothing, where each one stands alone."""
        return

    @abstractmethod
    async def store_events(
        self, session: AsyncSession, job: JobRow, drafts: Sequence[EventDraft]
    ) -> None:
        """Store what the child says, in a transaction that checked the lease."""

    def pause(self) -> None:
        """Tell the child to stop at its next step; what cannot be paused runs to its end."""
        return

    def has_stalled(self) -> bool:
        """Whether the child has not got on for too long."""
        return False

    async def before_settling(self) -> None:
        """Save what is worth keeping however the child ended."""
        return

    @abstractmethod
    async def settle(self, outcome: Outcome) -> None:
        """Store how it ended, and what follows from that."""

    async def settle_stalled(self, child: ChildProcess) -> None:
        """Store that the child, which still runs, did not get on; for work that can stall."""
        raise NotImplementedError

    @abstractmethod
    async def settle_cancelled(self) -> None:
        """Store that it was cancelled."""

    @abstractmethod
    async def release(self) -> None:
        """Give the work back to the queue: this worker stops."""

    async def heartbeat(self) -> JobStatus:
        """Keep the lease; the job's status."""
        async with unit_of_work(self.sessions) as session:
            return await heartbeat(session, self.lease)

    async def relay(self) -> bool:
        """Store the next batch of events; whether there was one."""
        if not has_more(self.path, self._relayed):
            return False
        async with unit_of_work(self.sessions) as session:
            job, attempt = await fenced(session, self.lease)
            drafts, attempt.relayed = read_events(self.path, attempt.relayed)
            await self.store_events(session, job, drafts)
        self._relayed = attempt.relayed
        return bool(drafts)

    async def _run(self) -> None:
        child = await ChildProcess.start(self.module, self.path, gpu_indexes=self.lease.gpu_indexes)
        try:
            ending = await watch(self.context, child, self)
            log.info("child.ended", ending=ending, returncode=child.returncode)
            if ending in (Ending.EXITED, Ending.CANCELLED):
                await self.before_settling()
            if ending is Ending.STALLED:
                await self.settle_stalled(child)
            elif ending is Ending.STOPPING:
                await until_stored(self.release)
            elif ending is Ending.CANCELLED:
                await until_stored(self.settle_cancelled)
            elif ending is Ending.EXITED:
                full = child.memory_was_full
                await self.settle(read_outcome(self.path, child.returncode, memory_was_full=full))
        finally:
            await child.kill()  # whatever went wrong here, no child outlives its supervisor
