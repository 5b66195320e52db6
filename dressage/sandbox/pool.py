"""Workers that share the calls of many rollouts."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from dressage.sandbox.process import Failure, Outcome, Sandbox, SandboxStartError, Worker

log = logging.getLogger(__name__)

MAX_TOLD = 50  # calls of a pool whose prints are shown
FEW = 16  # workers that are started without a thought; more only for calls that would wait
PATIENCE = 0.05  # seconds that a call waits for one of them
TIME_IS_OVER = Outcome(failure=Failure.TIMED_OUT, message="the time for all of them is over")


class WorkerPool:
    """Runs calls side by side: on the worker they belong to, or on any that is free."""

    def __init__(self, sandbox: Sandbox, *, size: int) -> None:
        self.sandbox = sandbox
        # Tools and measures never share a process: what a tool has patched judges nothing.
        self._idle: dict[str, list[Worker]] = defaultdict(list)
        self._busy = 0  # of those that are shared
        self._freed = threading.Condition()
        self._told = 0
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="sandbox")

    async def call(
        self,
        own: Worker | None,
        request: dict[str, Any],
        timeout: float,
        *,
        until: float | None = None,
        questions: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Outcome:
        """Answer one call, while others are answered.

        Args:
            own: The worker that must take it, which takes one after the other; None: any.
            request: What to do.
            timeout: Seconds it may take.
            until: A time of `time.monotonic()` at which it must be over.
            questions: Answers what the code asks meanwhile; an own worker alone may ask.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._call, own, request, timeout, until, questions
        )

    async def start_worker(self) -> Worker:
        """A process of the caller's own.

        Raises:
            SandboxStartError: Nobody is there to fork it.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.sandbox.start_worker)

    def _tell(self, name: str, printed: str) -> None:
        """Show what the suite's code prints, as long as it is little."""
        with self._freed:
            self._told = told = self._told + 1
        if told <= MAX_TOLD:
            log.info("%s printed: %s", name, printed)
        if told == MAX_TOLD:
            log.warning("the suite's code prints a lot; nothing more of it is shown")

    def close(self) -> None:
        """End the workers of the pool and the sandbox."""
        self._threads.shutdown()
        for worker in chain.from_iterable(self._idle.values()):
            worker.kill()
        self._idle.clear()
        self.sandbox.close()

    def _call(
        self,
        own: Worker | None,
        request: dict[str, Any],
        timeout: float,
        until: float | None,
        questions: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Outcome:
        if until is not None:
            timeout = min(timeout, until - time.monotonic())
            if timeout <= 0:
                return TIME_IS_OVER
        outcome = own.call(request, timeout, questions) if own else self._shared(request, timeout)
        if outcome.printed:
            self._tell(request.get("name") or request["call"], outcome.printed)
        return outcome

    def _shared(self, request: dict[str, Any], timeout: float) -> Outcome:
        kind = request["call"]
        try:
            worker = self._taken(kind)
        except SandboxStartError as error:
            return Outcome(failure=Failure.CRASHED, message=str(error))
        try:
            return worker.call(request, timeout)
        finally:
            with self._freed:
                self._busy -= 1
                if worker.alive:
                    self._idle[kind].append(worker)
                self._freed.notify_all()

    def _taken(self, kind: str) -> Worker:
        """An idle worker, or a new one: short calls share few, long ones need not wait."""
        with self._freed:
            if not self._idle[kind] and self._busy >= FEW:
                self._freed.wait_for(lambda: self._idle[kind], PATIENCE)
            self._busy += 1
            if self._idle[kind]:
                return self._idle[kind].pop()
        try:
            return self.sandbox.start_worker()
        except BaseException:
            with self._freed:
                self._busy -= 1
            raise
