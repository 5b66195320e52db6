"""Watches a child: relays its events, keeps its lease, ends it when it has to end."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum

import structlog
from sqlalchemy.exc import OperationalError

from app.queue.claim import StaleLease
from dressage.spec.status import JobStatus
from worker.supervisor.context import WorkerContext
from worker.supervisor.process import ChildProcess

log = structlog.get_logger()

POLL_SECONDS = 0.5


class Ending(StrEnum):
    """Why the watch ended."""

    EXITED = "exited"
    CANCELLED = "cancelled"
    STOPPING = "stopping"
    STALE = "stale"


async def watch(
    context: WorkerContext,
    child: ChildProcess,
    *,
    heartbeat: Callable[[], Awaitable[JobStatus]],
    relay: Callable[[], Awaitable[bool]],
    pause: Callable[[], object] | None = None,
) -> Ending:
    """Until the child ends, or must.

    A worker that cannot reach the database for most of its lease ends its own child, before the
    lease passes to another worker.

    Args:
        context: This worker.
        child: The running child; ended on return unless it exited by itself.
        heartbeat: Extends the lease and returns the job's status.
        relay: Stores the next batch of events and says whether there was one.
        pause: Tells the child to stop at its next step.
    """
    confirmed = time.monotonic()
    while True:
        exited = await child.wait(POLL_SECONDS)
        if context.stopping.is_set() and not exited:
            await child.kill()
            return Ending.STOPPING
        try:
            status = await heartbeat()
            confirmed = time.monotonic()
            if status is JobStatus.CANCELLING:
                await child.kill()
                return Ending.CANCELLED
            if status is JobStatus.PAUSING and pause:
                pause()
            while await relay():
                await heartbeat()
        except StaleLease:
            log.warning("lease.stale")
            await child.kill()
            return Ending.STALE
        except OperationalError as error:
            log.warning("database.unreachable", error=str(error).splitlines()[0])
            if time.monotonic() - confirmed > 0.8 * context.lease_seconds:
                await child.kill()
                return Ending.STALE
            await asyncio.sleep(POLL_SECONDS)
            continue
        if exited:
            return Ending.EXITED
