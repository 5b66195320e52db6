"""`python -m worker.scheduler`: once a second, end expired leases and ring for waiting work.

A loop of its own and not a Celery task: expired leases must be ended also while Redis is down.
Several may run; they do each other's work without harm.
"""

import asyncio
import signal

import structlog
from sqlalchemy.exc import OperationalError

from app.db.engine import Sessions, create_engine, create_sessions, unit_of_work
from app.queue.celery_options import create_celery
from app.queue.claim import reap
from app.queue.doorbell import Queue, ring
from app.queue.exports import reap_exports
from app.queue.waiting import queues_with_work
from app.settings import Settings

log = structlog.get_logger()

TICK_SECONDS = 1.0


async def tick(sessions: Sessions, *, max_attempts: int) -> set[Queue]:
    """One round. Returns the queues that have work nobody has claimed."""
    async with unit_of_work(sessions) as session:
        lost = await reap(session, max_attempts=max_attempts)
    async with unit_of_work(sessions) as session:
        lost += await reap_exports(session)
    if lost:
        log.warning("leases.expired", jobs=lost)
    async with unit_of_work(sessions) as session:
        return await queues_with_work(session)


async def main() -> None:
    """Tick until told to stop."""
    settings = Settings()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sessions = create_sessions(create_engine(settings.sqlalchemy_url))
    celery = create_celery(settings.celery_url)
    log.info("scheduler.started")
    while not stop.is_set():
        try:
            for queue in await tick(sessions, max_attempts=settings.max_attempts):
                await asyncio.to_thread(ring, celery, queue)
        except OperationalError as error:
            log.warning("scheduler.database", error=str(error).splitlines()[0])
        try:
            await asyncio.wait_for(stop.wait(), TICK_SECONDS)
        except TimeoutError:
            continue


if __name__ == "__main__":
    asyncio.run(main())
