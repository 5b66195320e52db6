"""The worker process: `celery -A worker.celery_app worker -Q training --pool threads -c 1`.

The thread pool, because a task must start a child process and outlive its message; one slot a
process, because a slot owns its GPUs.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import threading
from typing import Any

import structlog
from celery.signals import worker_ready, worker_shutdown, worker_shutting_down
from sqlalchemy.exc import OperationalError

from app.db.engine import create_engine, create_sessions, unit_of_work
from app.queue.celery_options import create_celery
from app.queue.doorbell import Queue
from app.settings import Settings
from app.storage import Storage
from app.workers import repository as workers
from worker.supervisor.context import WorkerContext

log = structlog.get_logger()

PRESENCE_SECONDS = 5.0


def count_gpus() -> int:
    """GPUs that the driver lists; torch stays out of this process."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


settings = Settings()
celery = create_celery(settings.celery_url)
context = WorkerContext(
    worker_id=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
    gpus=count_gpus() if settings.gpus is None else settings.gpus,
    database_url=settings.sqlalchemy_url,
    storage=Storage(settings.storage_dir),
    runs_dir=settings.runs_dir,
    lease_seconds=settings.lease_seconds,
    stopping=threading.Event(),
)


@worker_ready.connect  # type: ignore[untyped-decorator]
def _announce(sender: Any, **_: Any) -> None:
    queues = {str(queue) for queue in sender.app.amqp.queues}
    queue = Queue.TRAINING if Queue.TRAINING in queues else Queue.EXPORTS
    threading.Thread(target=asyncio.run, args=(_presence(queue),), daemon=True).start()


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _stop(**_: Any) -> None:
    context.stopping.set()  # running work goes back to the queue


@worker_shutdown.connect  # type: ignore[untyped-decorator]
def _leave(**_: Any) -> None:
    asyncio.run(_gone())


async def _presence(queue: Queue) -> None:
    engine = create_engine(settings.sqlalchemy_url, pooled=False)
    sessions = create_sessions(engine)
    while not context.stopping.is_set():
        try:
            async with unit_of_work(sessions) as session:
                await workers.beat(
                    session,
                    worker_id=context.worker_id,
                    hostname=socket.gethostname(),
                    pid=os.getpid(),
                    queue=queue,
                    gpus=context.gpus,
                )
        except OperationalError as error:
            log.warning("presence.database", error=str(error).splitlines()[0])
        await asyncio.sleep(PRESENCE_SECONDS)


async def _gone() -> None:
    engine = create_engine(settings.sqlalchemy_url, pooled=False)
    with contextlib.suppress(OperationalError):  # it will be forgotten by its silence
        async with unit_of_work(create_sessions(engine)) as session:
            await workers.leave(session, context.worker_id)


import worker.tasks  # noqa: E402, F401  registers the tasks on `celery`
