"""The suite's code, loaded in a sandbox for as long as a run needs it."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dressage.authoring.suite import Suite
from dressage.sandbox.isolation import Isolation, strongest
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Limits, Sandbox, SandboxStartError
from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure

log = logging.getLogger(__name__)

# Of one environment on average: processes and threads, bytes of files.
THREADS, DISK = 4, 16 * 1024**2


@contextmanager
def user_code(suite: Suite, *, network: bool, size: int, workers: int = 0) -> Iterator[WorkerPool]:
    """Workers that run the suite's code.

    Args:
        suite: Whose code it is.
        network: Whether it may use the network.
        size: Calls at a time.
        workers: Environments that may be open at the same time.

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
            limits = Limits(
                processes=Limits().processes + THREADS * workers,
                disk_bytes=Limits().disk_bytes + DISK * workers,
            )
            pool = WorkerPool(Sandbox(Path(folder), limits, walls), size=size)
        except SandboxStartError as error:
            raise RunFailure(Reason.USER_CODE_ERROR, f"the suite's code: {error}") from None
        try:
            yield pool
        finally:
            pool.close()
