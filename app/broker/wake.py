"""Wakes workers through Celery.

Wakes are collected and sent after the commit; on a rollback they are forgotten.
"""

from enum import StrEnum

import structlog
from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

log = structlog.get_logger()

EXPIRES_SECONDS = 5


class Queue(StrEnum):
    """The Celery queues, one for each kind of work. A training worker also has one of its own."""

    TRAINING = "training"
    EXPORTS = "exports"


def own_queue(worker_id: str) -> str:
    """The queue that one training worker alone listens to."""
    return f"{Queue.TRAINING}.{worker_id}"


def wake(celery: Celery, whom: Queue | str) -> None:
    """Tell any worker of a queue, or one worker by its id, to look for work.

    A lost message is repeated by the scheduler.
    """
    queue = whom if isinstance(whom, Queue) else own_queue(whom)
    kind = whom if isinstance(whom, Queue) else Queue.TRAINING
    try:
        celery.send_task(
            f"look_for_{kind}",
            queue=queue,
            expires=EXPIRES_SECONDS,
            ignore_result=True,
            retry=False,
        )
    except (OperationalError, RedisError) as error:
        log.warning("wake.failed", queue=queue, error=str(error))


def broker_problem(celery: Celery) -> str | None:
    """Why the broker takes no message, if it takes none."""
    try:
        with celery.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=3)
            connection.default_channel.client.set("dressage-readyz", "1", ex=60)
    except (OperationalError, RedisError, OSError) as error:
        return str(error)
    return None


class PendingWakes:
    """The queues to wake once a transaction is committed."""

    def __init__(self) -> None:
        self._queues: set[Queue] = set()

    def take(self) -> set[Queue]:
        """The queues to wake now; they are forgotten here."""
        queues, self._queues = self._queues, set()
        return queues

    def training(self) -> None:
        """There is a job to train."""
        self._queues.add(Queue.TRAINING)

    def exports(self) -> None:
        """There is an export to do."""
        self._queues.add(Queue.EXPORTS)
