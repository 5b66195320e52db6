"""The tasks: a message says only "look"; what there is to do stands in Postgres."""

import asyncio

from app.broker.wake import Queue, wake
from worker.celery_app import celery, context, looking
from worker.supervisor.export_run import run_next_export
from worker.supervisor.training_run import run_next_job


def look_for_training() -> None:
    """Run jobs until none is left for this worker; then tell the one that has the next."""
    while not context.stopping.is_set():
        found = asyncio.run(run_next_job(context))
        if found.lease is None:
            for worker_id in found.others[:1]:
                wake(celery, worker_id)
            return


def look_for_exports() -> None:
    """Run exports until none is left."""
    while not context.stopping.is_set() and asyncio.run(run_next_export(context)):
        pass


LOOKS = {Queue.TRAINING: look_for_training, Queue.EXPORTS: look_for_exports}


@celery.task(name=f"look_for_{Queue.TRAINING}")  # type: ignore[untyped-decorator]
def told_of_training() -> None:
    """A job may wait."""
    looking.run(look_for_training)


@celery.task(name=f"look_for_{Queue.EXPORTS}")  # type: ignore[untyped-decorator]
def told_of_exports() -> None:
    """An export may wait."""
    looking.run(look_for_exports)
