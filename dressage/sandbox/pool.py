"""Workers that share the calls of many rollouts."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from dressage.sandbox.process import Failure, Outcome, Sandbox, SandboxStartError, Worker

log = logging.getLogger(__name__)

MAX_TOLD = 50  # calls of a pool whose prints are shown
TIME_IS_OVER = Outcome(failure=Failure.TIMED_OUT, message="the time for all of them is over")
Call = tuple[Worker | None, dict[str, Any]]


class WorkerPool:
    """Runs calls side by side: on the worker they belong to, or on any that is free."""

    def __init__(self, sandbox: Sandbox, *, size: int) -> None:
        self.sandbox = sandbox
        # Tools and measures never share a process: what a tool has patched judges nothing.
        self._idle: dict[str, list[Worker]] = defaultdict(list)
        self._lock = threading.Lock()
        self._told = 0
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

        outcomes = list(self._threads.map(one, calls))
        for (_, request), outcome in zip(calls, outcomes, strict=True):
            if outcome.printed:
                self._tell(request.get("name") or request["call"], outcome.printed)
        return outcomes

    def _tell(self, name: str, printed: str) -> None:
        """Show what the suite's code prints, as long as it is little."""
        self._told += 1
        if self._told <= MAX_TOLD:
            log.info("%s printed: %s", name, printed)
        if self._told == MAX_TOLD:
            log.warning("the suite's code prints a lot; nothing more of it is shown")

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
