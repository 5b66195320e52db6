"""Signs of life within a step: rollouts of many turns can take longer than a run may be silent."""

import time

from dressage.spec.event import EventType
from worker.wire.run_dir import RunDirectory

EVERY_SECONDS = 60.0


class Pulse:
    """Says now and then how many rollouts are played."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._said = run, time.monotonic()

    def beat(self, done: int, count: int) -> None:
        """A turn of a batch of rollouts is over."""
        if time.monotonic() - self._said < EVERY_SECONDS:
            return
        self._said = time.monotonic()
        message = f"{done} of {count} rollouts of this batch are played"
        self._run.emit(EventType.ALIVE, message=message)
