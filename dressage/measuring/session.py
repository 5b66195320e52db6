"""A suite's code in the sandbox for as long as its measures are needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dressage.authoring.suite import Suite
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Sandbox

WORKERS = 4


@contextmanager
def sandboxed(suite: Suite) -> Iterator[WorkerPool]:
    """Some workers that run the suite's code.

    Raises:
        SandboxStartError: The code does not load.
    """
    with TemporaryDirectory(prefix="dressage-suite-") as folder:
        suite.write_code(Path(folder))
        pool = WorkerPool(Sandbox(Path(folder)), size=WORKERS)
        try:
            yield pool
        finally:
            pool.close()
