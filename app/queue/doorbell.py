"""Rings workers through Celery. A message says only "look": the truth is in Postgres.

Rings are collected and sent after commit; on rollback they are forgotten.
"""

from enum import StrEnum

import structlog
from celery import Celery
from kombu.exceptions import OperationalError

log = structlog.get_logger()

EXPIRES_SECONDS = 5


class Queue(StrEnum):
    """The Celery queues, one for each kind of work. A training worker also has one of its own."""

    TRAINING = "training"
    EXPORTS = "exports"


def own_queue(worker_id: str) -> str:
    """The queue that one training worker alone listens to."""
    return f"{Queue.TRAINING}.{worker_id}"


def ring(celery: Celery, bell: Queue | str) -> None:
    """Tell any worker of a queue, or one worker by its id, to look for work.

    A lost ring is repeated by the scheduler.
    """
    queue = bell if isinstance(bell, Queue) else own_queue(bell)
    kind = bell if isinstance(bell, Queue) else Queue.TRAINING
    try:
        celery.send_task(
            f"look_for_{kind}",
            queue=queue,
            expires=EXPIRES_SECONDS,
            ignore_result=True,
            retry=False,
        )
    except OperationalError as error:
        log.warning("doorbell.failed", queue=queue, error=str(error))


class Doorbell:
    """The rings of one transaction."""

    def __init__(self) -> None:
        self.rings: set[Queue] = set()

    def take(self) -> set[Queue]:
        """The rings to send now; they are forgotten here."""
        rings, self.rings = self.rings, set()
        return rings

    def training(self) -> None:
        """There is a job to train."""
        self.rings.add(Queue.TRAINING)

    def exports(self) -> None:
        """There is an export to do."""
        self.rings.add(Queue.EXPORTS)
