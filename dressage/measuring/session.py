"""A suite's code in the sandbox for as long as its measures are needed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dressage.authoring.suite import Suite
from dressage.measuring.runner import MeasureRunner
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Sandbox
from dressage.spec.measure import RewardSpec

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


@contextmanager
def measuring(
    suite: Suite,
    rewards: Sequence[RewardSpec],
    *,
    timeout: float,
    seconds: float,
    judge_key: str | None,
) -> Iterator[tuple[MeasureRunner, WorkerPool]]:
    """Measures of a suite, and the workers they run on.

    Args:
        suite: Whose measures.
        rewards: Which.
        timeout: Seconds for one call.
        seconds: For all of them.
        judge_key: The bearer token for judges.

    Raises:
        SandboxStartError: The code does not load.
    """
    with sandboxed(suite) as pool:
        until = time.monotonic() + seconds
        runner = MeasureRunner(rewards, pool, timeout=timeout, until=until, judge_key=judge_key)
        try:
            yield runner, pool
        finally:
            runner.close()
