"""A few sandbox processes that share the calls of many rollouts."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dressage.sandbox.process import Limits, Outcome, SandboxProcess


class SandboxPool:
    """Starts one process at once, so that broken code is known, and more when calls wait.

    Raises:
        SandboxStartError: The code cannot be loaded.
    """

    def __init__(self, folder: Path, *, size: int, limits: Limits | None = None) -> None:
        self._folder, self._limits = folder, limits or Limits()
        first = SandboxProcess(folder, self._limits)
        self.tools = first.tools
        self.measures = first.measures
        self._idle: list[SandboxProcess] = [first]
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="sandbox")
        self.restarts = 0

    def run(self, requests: Sequence[dict[str, Any]], timeout: float) -> list[Outcome]:
        """Answer all requests, in order, as many at a time as there are processes."""
        call: Callable[[dict[str, Any]], Outcome] = lambda request: self._call(request, timeout)  # noqa: E731
        return list(self._threads.map(call, requests))

    def close(self) -> None:
        """End every process."""
        self._threads.shutdown()
        for process in self._idle:
            process.close()
        self._idle.clear()

    def _call(self, request: dict[str, Any], timeout: float) -> Outcome:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or SandboxProcess(self._folder, self._limits)
        outcome = process.call(request, timeout)
        with self._lock:
            if process.alive:
                self._idle.append(process)
            else:
                self.restarts += 1
        return outcome
