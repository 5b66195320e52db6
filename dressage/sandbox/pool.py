"""Workers that share the calls of many rollouts."""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from dressage.sandbox.process import Failure, Outcome, Sandbox, SandboxStartError, Worker

TIME_IS_OVER = Outcome(failure=Failure.TIMED_OUT, message="the time for all of them is over")
Call = tuple[Worker | None, dict[str, Any]]


class WorkerPool:
    """Runs calls side by side: on the worker they belong to, or on any that is free."""

    def __init__(self, sandbox: Sandbox, *, size: int) -> None:
        self.sandbox = sandbox
        # Tools and measures never share a process: what a tool has patched judges nothing.
        self._idle: dict[str, list[Worker]] = defaultdict(list)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="sandbox")

    def run(
        self, calls: Sequence[Call], timeout: float, *, until: float | None = None
    ) -> list[Outcome]:
        """Answer all calls, in order, as many at a time as the pool's size.

        Args:
            calls: Each with the worker that must take it, or None. Calls for one worker are not
                made at the same time: put those into one `run` after the other.
            timeout: Seconds for each.
            until: A time of `time.monotonic()` at which all must be over.
        """

        def one(call: Call) -> Outcome:
            left = timeout if until is None else min(timeout, until - time.monotonic())
            return self._call(call[0], call[1], left) if left > 0 else TIME_IS_OVER

        return list(self._threads.map(one, calls))

    def close(self) -> None:
        """End the workers of the pool and the sandbox."""
        self._threads.shutdown()
        for worker in chain.from_iterable(self._idle.values()):
            worker.kill()
        self._idle.clear()
        self.sandbox.close()

    def _call(self, own: Worker | None, request: dict[str, Any], timeout: float) -> Outcome:
        if own:
            return own.call(request, timeout)
        idle = self._idle[request["call"]]
        with self._lock:
            worker = idle.pop() if idle else None
        try:
            worker = worker or self.sandbox.start_worker()
        except SandboxStartError as error:
            return Outcome(failure=Failure.CRASHED, message=str(error))
        outcome = worker.call(request, timeout)
        if worker.alive:
            with self._lock:
                idle.append(worker)
        return outcome
