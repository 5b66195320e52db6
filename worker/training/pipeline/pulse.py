"""Signs of life within a step: rollouts of many turns can take longer than a run may be silent."""

import time

from dressage.spec.event import EventType
from worker.wire.run_dir import RunDirectory

EVERY_SECONDS = 60.0


class Pulse:
    """Says now and then how many turns are played."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._said, self._turns = run, time.monotonic(), 0

    def beat(self) -> None:
        """A turn of a rollout is over."""
        self._turns += 1
        if time.monotonic() - self._said < EVERY_SECONDS:
            return
        self._said = time.monotonic()
        message = f"{self._turns} turns of rollouts are played"
        self._run.emit(EventType.ALIVE, message=message)
