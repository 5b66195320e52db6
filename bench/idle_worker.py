"""The real worker with a child that only says that it lives, for `api_load.py`.

Celery loads it as an app; the worker runs it as the child.
"""

import dataclasses
import sys
import time
from pathlib import Path


def child(run):
    from dressage.spec.event import EventType
    from worker.wire.run_dir import RunDirectory

    RunDirectory(Path(run)).emit(EventType.STATUS, status="training")
    time.sleep(3600)


if __name__ == "__main__":
    child(sys.argv[1])
else:
    import worker.celery_app
    import worker.tasks

    worker.tasks.context = dataclasses.replace(
        worker.celery_app.context, training_module="idle_worker"
    )
    celery = worker.celery_app.celery
