"""Watches a child: relays its events, keeps its lease, ends it when it has to end."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Protocol, TypeVar

import structlog

from app.db.engine import DATABASE_UNAVAILABLE
from app.scheduling.leases import StaleLease
from app.storage import StorageUnavailable
from dressage.spec.status import JobStatus
from worker.supervisor.context import WorkerContext
from worker.supervisor.outcome import ended_by
from worker.supervisor.process import ChildProcess

log = structlog.get_logger()

POLL_SECONDS = 0.5
ANSWER_SECONDS = 10.0  # a database that takes longer is away
STORE_AGAIN_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 5.0
# Who stops a service may tell all its processes at once.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_NOTICED_SECONDS = 3.0
T = TypeVar("T")


class Ending(StrEnum):
    """Why the watch ended."""

    EXITED = "exited"
    CANCELLED = "cancelled"
    STOPPING = "stopping"
    STALE = "stale"
    STALLED = "stalled"


class Watched(Protocol):
    """What the watch asks of a piece of work."""

    async def heartbeat(self) -> JobStatus:
        """Keep the lease; the job's status."""

    async def relay(self) -> bool:
        """Store the next batch of events; whether there was one."""

    def pause(self) -> None:
        """Tell the child to stop at its next step."""

    def has_stalled(self) -> bool:
        """Whether the child has not got on for too long."""


async def watch(context: WorkerContext, child: ChildProcess, work: Watched) -> Ending:
    """Watch until the child ends, or must. It has ended on return, unless it stalled.

    A worker that cannot reach the database for most of its lease ends its own child, before the
    lease passes to another worker.
    """
    confirmed, more, away = time.monotonic(), False, 0
    while True:
        exited = await child.wait(0 if more else POLL_SECONDS)
        if await _stops(context, child, exited=exited):
            await child.kill()
            return Ending.STOPPING
        try:
            async with asyncio.timeout(min(ANSWER_SECONDS, 0.4 * context.lease_seconds)):
                status = await work.heartbeat()
            confirmed, away = time.monotonic(), 0
            if status is JobStatus.CANCELLING:
                await child.kill()
                return Ending.CANCELLED
            if status is JobStatus.PAUSING:
                work.pause()
            more = await work.relay()  # one batch: whoever talks all the time is heeded, too
        except StaleLease:
            log.warning("lease.stale")
            await child.kill()
            return Ending.STALE
        except DATABASE_UNAVAILABLE as error:
            away += 1
            log.warning("database.unreachable", error=str(error).splitlines()[:1], tries=away)
            if time.monotonic() - confirmed > 0.8 * context.lease_seconds and not exited:
                await child.kill()
                return Ending.STALE
            await asyncio.sleep(before_next(away))
            continue
        if exited and not more:
            return Ending.EXITED
        if work.has_stalled():
            return Ending.STALLED


async def _stops(context: WorkerContext, child: ChildProcess, *, exited: bool) -> bool:
    """Whether this worker is being stopped. A stop may have ended the child first."""
    if exited and ended_by(child.returncode) in STOP_SIGNALS:
        for _ in range(int(STOP_NOTICED_SECONDS / POLL_SECONDS)):
            if context.stopping.is_set():
                return True
            await asyncio.sleep(POLL_SECONDS)
    return context.stopping.is_set() and not exited


def before_next(tries: int) -> float:
    """Seconds to wait after so many tries in a row that failed: longer and longer."""
    return float(min(POLL_SECONDS * 2 ** min(tries - 1, 10), LONGEST_WAIT_SECONDS))


async def patiently(context: WorkerContext, work: Watched, slow: Callable[[], T]) -> T:
    """Move files in a thread with the lease kept, and again for as long as the store is away.

    Raises:
        StaleLease: The work is somebody else's by now.
        StorageUnavailable: The store is away, and the job is cancelled or the worker stops.
    """
    while True:
        moving = asyncio.create_task(asyncio.to_thread(slow))
        status = None
        while not moving.done():
            await asyncio.wait([moving], timeout=POLL_SECONDS)
            status = await _still_ours(work) or status
        try:
            return moving.result()
        except StorageUnavailable as error:
            if context.stopping.is_set() or status is JobStatus.CANCELLING:
                raise
            log.warning("storage.away", error=str(error))
            await asyncio.sleep(STORE_AGAIN_SECONDS)


async def _still_ours(work: Watched) -> JobStatus | None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await work.heartbeat()
    except DATABASE_UNAVAILABLE as error:
        log.warning("database.unreachable", error=str(error).splitlines()[:1])
        return None


async def until_stored(write: Callable[[], Awaitable[T]]) -> T:
    """Repeat a transaction until the database takes it: what a child has made is not thrown away.

    Raises:
        StaleLease: From the transaction; the work is somebody else's by now, or is stored already.
    """
    tries = 0
    while True:
        try:
            async with asyncio.timeout(ANSWER_SECONDS * 6):
                return await write()
        except DATABASE_UNAVAILABLE as error:
            tries += 1
            log.warning("database.unreachable", error=str(error).splitlines()[:1], tries=tries)
            await asyncio.sleep(before_next(tries))
