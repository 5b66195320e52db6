"""One supervisor for everything that runs beside requests and jobs: what fails is started again."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger()

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
STEADY_SECONDS = 60.0


class Background:
    """Keeps tasks running, and knows which of them cannot."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[float, str]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run until `stop`; after an exception again, after growing delays."""
        self._tasks.append(asyncio.create_task(self.keep(name, work), name=name))

    async def keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run until it returns by itself."""
        delay = FIRST_DELAY
        while True:
            started = time.monotonic()
            try:
                return await work()
            except Exception as error:  # whatever it is, the others and the next try go on
                log.exception("background.failed", task=name)
                self.failed(name, error)
            if time.monotonic() - started > STEADY_SECONDS:
                delay = FIRST_DELAY
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    def failed(self, name: str, error: Exception) -> None:
        """Remember what went wrong."""
        self._failed[name] = (time.monotonic(), f"{type(error).__name__}: {error}"[:300])

    def problems(self) -> dict[str, str]:
        """What went wrong a short time ago, by the name of its task."""
        since = time.monotonic() - STEADY_SECONDS - LONGEST_DELAY
        return {name: text for name, (at, text) in self._failed.items() if at > since}

    async def stop(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
