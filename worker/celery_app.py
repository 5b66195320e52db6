"""The worker process: `celery -A worker.celery_app worker -Q training --pool threads -c 1`.

The thread pool, because a task must start a child process and outlive its message. A thread for
each GPU of the worker, and one for a job on its CPU: `python -m worker.presence` prints how many.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from datetime import timedelta
from importlib import import_module
from typing import Any

import structlog
from celery.signals import celeryd_after_setup, worker_ready, worker_shutdown, worker_shutting_down

from app.background import Background
from app.broker.celery import create_celery
from app.broker.wake import Queue, own_queue
from app.db.engine import (
    DATABASE_UNAVAILABLE,
    Sessions,
    create_engine,
    create_sessions,
    unit_of_work,
)
from app.logs import configure_logs
from app.scheduling.retries import RetryPolicy
from app.settings import read_settings, require_isolation
from app.storage import open_storage
from app.workers import repository as workers
from worker.cleaning import remove, runs_to_remove
from worker.looking import Looking
from worker.presence import describe
from worker.supervisor.context import WorkerContext
from worker.supervisor.temporary import left_behind

log = structlog.get_logger()

PRESENCE_SECONDS, STOP_SECONDS = 5.0, 15.0
CLEANING_SECONDS = 3600.0


configure_logs()
settings = read_settings()
log.info("user_code.isolation", walls=require_isolation(settings.minimum_isolation))
celery = create_celery(settings.celery_url)
looking = Looking()
celery.conf.imports = ("worker.tasks",)
context = WorkerContext(
    worker_id=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
    database_url=settings.sqlalchemy_url,
    storage=open_storage(settings.storage, links=False),
    runs_dir=settings.runs_dir,
    lease_seconds=settings.lease_seconds,
    stall_seconds=settings.stall_seconds,
    retry_policy=RetryPolicy(settings.max_attempts, settings.retry_back_off_seconds),
    stopping=threading.Event(),
    ollama_urls=tuple(settings.ollama_urls),
)


@celeryd_after_setup.connect  # type: ignore[untyped-decorator]
def _listen(instance: Any, **_: Any) -> None:
    queues = instance.app.amqp.queues
    if Queue.TRAINING in queues:
        queues.select_add(own_queue(context.worker_id))


@worker_ready.connect  # type: ignore[untyped-decorator]
def _announce(sender: Any, **_: Any) -> None:
    queues = {str(queue) for queue in sender.app.amqp.queues}
    queue = Queue.TRAINING if Queue.TRAINING in queues else Queue.EXPORTS
    looking.room = sender.controller.concurrency
    threading.Thread(target=asyncio.run, args=(_beside(queue),), daemon=True).start()


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _stop(**_: Any) -> None:
    context.stopping.set()  # running work goes back to the queue


@worker_shutdown.connect  # type: ignore[untyped-decorator]
def _leave(**_: Any) -> None:
    looking.finish(STOP_SECONDS)
    asyncio.run(_gone())


async def _beside(queue: Queue) -> None:
    sessions = create_sessions(create_engine(settings.sqlalchemy_url, pooled=False))
    background = Background()
    background.start("presence", lambda: _presence(sessions, queue))
    background.start("cleaning", lambda: _clean(sessions))
    look = import_module("worker.tasks").LOOKS[queue]
    background.start("looking", lambda: looking.now_and_then(look))
    while not context.stopping.is_set():
        await asyncio.sleep(1)
    await background.stop()


async def _clean(sessions: Sessions) -> None:
    age = timedelta(days=settings.keep_runs_days)
    while not context.stopping.is_set():
        with contextlib.suppress(*DATABASE_UNAVAILABLE):
            async with unit_of_work(sessions) as session:
                unneeded = await runs_to_remove(session, settings.runs_dir, age)
            await asyncio.to_thread(remove, unneeded + left_behind())
        await asyncio.sleep(CLEANING_SECONDS)


async def _presence(sessions: Sessions, queue: Queue) -> None:
    presence = describe(queue, gpus=settings.gpus, labels=settings.worker_labels)
    while not context.stopping.is_set():
        try:
            async with asyncio.timeout(PRESENCE_SECONDS), unit_of_work(sessions) as session:
                await workers.beat(session, context.worker_id, presence)
                await workers.forget_silent(session)
        except DATABASE_UNAVAILABLE as error:
            log.warning("presence.database", error=str(error).splitlines()[:1])
        await asyncio.sleep(PRESENCE_SECONDS)


async def _gone() -> None:
    engine = create_engine(settings.sqlalchemy_url, pooled=False)
    with contextlib.suppress(*DATABASE_UNAVAILABLE):  # it will be forgotten by its silence
        async with unit_of_work(create_sessions(engine)) as session:
            await workers.leave(session, context.worker_id)
