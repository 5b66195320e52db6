"""Threads for slow work of requests: of its own for each kind, and only so many for each team."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from app.exceptions import TooManyRequests

T = TypeVar("T")
TRY_AGAIN_SECONDS = 5.0


class TeamPool:
    """Runs functions in threads that nothing else waits for.

    Args:
        size: Threads.
        per_team: How many of them one team may have at a time.
        what: What they do, for the sentence that refuses.
    """

    def __init__(self, size: int, *, per_team: int, what: str) -> None:
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=what.replace(" ", "-"))
        self._per_team, self._what = per_team, what
        self._running = Counter[str]()

    async def run(self, team: str, work: Callable[[], T]) -> T:
        """The result, once there is a thread.

        Raises:
            TooManyRequests: The team has its share already.
        """
        if self._running[team] >= self._per_team:
            raise TooManyRequests(
                TRY_AGAIN_SECONDS,
                f"{self._per_team} {self._what} of your team run already; wait for one to end",
            )
        self._running[team] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._running[team] -= 1

    def close(self) -> None:
        """End what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
