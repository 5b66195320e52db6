"""The suite's code, loaded in a sandbox for as long as a run needs it."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dressage.authoring.suite import Suite
from dressage.sandbox.isolation import Isolation, strongest
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Sandbox, SandboxStartError
from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure

log = logging.getLogger(__name__)


@contextmanager
def user_code(suite: Suite, *, network: bool, size: int) -> Iterator[WorkerPool]:
    """Workers that run the suite's code, as many calls at a time as `size`.

    Raises:
        RunFailure: The code does not load.
    """
    with tempfile.TemporaryDirectory(prefix="dressage-suite-") as folder:
        suite.write_code(Path(folder))
        walls = strongest(network=network)
        log.info("the suite's code runs behind: %s", walls)
        if walls.isolation is Isolation.LIMITS:
            log.warning("this host can only limit the suite's code, not isolate it")
        try:
            pool = WorkerPool(Sandbox(Path(folder), walls=walls), size=size)
        except SandboxStartError as error:
            raise RunFailure(Reason.USER_CODE_ERROR, f"the suite's code: {error}") from None
        try:
            yield pool
        finally:
            pool.close()
