"""`python -m worker.scheduler`: once a second, end silent leases, explain the queue, wake.

A loop of its own and not a Celery task: silent leases must be ended also while Redis is down.
Several may run; they do each other's work without harm.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta

import structlog
from celery import Celery

from app.artifacts.blobs import sweep
from app.background import Background
from app.broker.celery import create_celery
from app.broker.wake import Queue, wake
from app.db.engine import (
    DATABASE_UNAVAILABLE,
    Sessions,
    create_engine,
    create_sessions,
    unit_of_work,
)
from app.exports.leases import exports_wait, reap_exports
from app.health import SCHEDULER, beat
from app.jobs.retention import forget_bulk, forget_files
from app.logs import configure_logs
from app.scheduling.explain import look
from app.scheduling.heartbeats import HeartbeatMonitor
from app.scheduling.leases import open_leases, reap
from app.scheduling.retries import RetryPolicy
from app.settings import read_settings
from app.storage import Storage, StorageUnavailable, open_storage
from app.webhooks.delivery import Sender

log = structlog.get_logger()

TICK_SECONDS, BEAT_SECONDS = 1.0, 5.0
FORGET_SECONDS = 600.0
SWEEP_SECONDS = 30.0
EXPLAIN_SECONDS = 5.0  # a forecast costs more than a look


class Scheduler:
    """What is remembered from one tick to the next."""

    def __init__(
        self,
        sessions: Sessions,
        background: Background,
        *,
        lease_seconds: float,
        policy: RetryPolicy,
    ) -> None:
        self._sessions, self._policy, self._background = sessions, policy, background
        self._explained = self._beaten = 0.0
        self._leases = HeartbeatMonitor(lease_seconds)

    async def tick(self) -> list[Queue | str]:
        """One round. Returns whom to wake: workers that a job waits for, and the exports' queue.

        One part that fails hinders none of the others.
        """
        wanted: list[Queue | str] = []
        explain = time.monotonic() - self._explained >= EXPLAIN_SECONDS

        async def reap_all() -> None:
            async with unit_of_work(self._sessions) as session:
                silent = self._leases.silent(await open_leases(session))
                lost = await reap(session, silent, self._policy)
            async with unit_of_work(self._sessions) as session:
                lost += await reap_exports(session, silent, self._policy)
            if lost:
                log.warning("leases.silent", jobs=lost)

        async def look_at_queue() -> None:
            async with unit_of_work(self._sessions) as session:
                wanted.extend(await look(session, explain=explain))
            if explain:
                self._explained = time.monotonic()

        async def look_at_exports() -> None:
            async with unit_of_work(self._sessions) as session:
                if await exports_wait(session):
                    wanted.append(Queue.EXPORTS)

        await self._apart("leases", reap_all)
        await self._apart("queue", look_at_queue)
        await self._apart("exports", look_at_exports)
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            async with unit_of_work(self._sessions) as session:
                await beat(session, SCHEDULER, self._background.problems())
            self._beaten = time.monotonic()
        return wanted

    async def _apart(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except DATABASE_UNAVAILABLE:
            raise
        except Exception as error:
            log.exception("scheduler.failed", part=name)
            self._background.failed(name, error)

    def blind(self) -> None:
        """Nothing could be seen: silence of this time does not count."""
        self._leases.blind()


def wake_all(celery: Celery, wanted: Iterable[Queue | str]) -> None:
    """Wake each queue or worker once."""
    for whom in wanted:
        wake(celery, whom)


async def send_webhooks(sender: Sender) -> None:
    """Send messages until cancelled; slow receivers delay no tick."""
    while True:
        try:
            await sender.start_due()
        except DATABASE_UNAVAILABLE as error:
            log.warning("webhooks.database", error=str(error).splitlines()[:1])
        await asyncio.sleep(TICK_SECONDS)


async def forget(sessions: Sessions, age: timedelta) -> None:
    """Trim history and files of jobs that ended long ago, until cancelled."""
    while True:
        try:
            async with unit_of_work(sessions) as session:
                trimmed = await forget_bulk(session, age) + await forget_files(session)
        except DATABASE_UNAVAILABLE:
            trimmed = 0
        if not trimmed:
            await asyncio.sleep(FORGET_SECONDS)


async def sweep_files(sessions: Sessions, storage: Storage) -> None:
    """Remove files that nothing points to, until cancelled."""
    while True:
        try:
            removed = await sweep(sessions, storage)
        except (StorageUnavailable, *DATABASE_UNAVAILABLE) as error:
            removed = 0
            log.warning("sweep.away", error=str(error).splitlines()[:1])
        if not removed:
            await asyncio.sleep(SWEEP_SECONDS)


async def main() -> None:
    """Tick until told to stop."""
    configure_logs()
    settings = read_settings()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sessions = create_sessions(create_engine(settings.sqlalchemy_url))
    background = Background()
    scheduler = Scheduler(
        sessions,
        background,
        lease_seconds=settings.lease_seconds,
        policy=RetryPolicy(settings.max_attempts, settings.retry_back_off_seconds),
    )
    storage = open_storage(settings.storage, links=False)
    celery = create_celery(settings.celery_url)
    log.info("scheduler.started")
    sender = Sender(sessions, settings.allowed_addresses)
    age = timedelta(days=settings.keep_history_days)
    background.start("webhooks", lambda: send_webhooks(sender))
    background.start("history", lambda: forget(sessions, age))
    background.start("files", lambda: sweep_files(sessions, storage))
    while not stop.is_set():
        try:
            async with asyncio.timeout(settings.lease_seconds / 2):
                wanted = await scheduler.tick()
            await asyncio.to_thread(wake_all, celery, wanted)
        except DATABASE_UNAVAILABLE as error:
            scheduler.blind()
            log.warning("scheduler.database", error=str(error).splitlines()[:1])
        try:
            await asyncio.wait_for(stop.wait(), TICK_SECONDS)
        except TimeoutError:
            continue
    await background.stop()


if __name__ == "__main__":
    asyncio.run(main())
