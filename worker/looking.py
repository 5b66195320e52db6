"""When a worker looks for work: when it is told to, and now and then by itself."""

import asyncio
import random
import threading
from collections.abc import Callable

LOOK_SECONDS = 4.0


class Looking:
    """Runs looks at the queue, never more at a time than the worker has room for.

    Messages and the clock come here both: without a broker, work is found a little later.
    """

    def __init__(self) -> None:
        self.room = 1
        self._running: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run(self, look: Callable[[], None]) -> None:
        """Run it in this thread, unless there is no room. Who has room looks again at the end."""
        thread = threading.current_thread()
        with self._lock:
            if len(self._running) >= self.room:
                return
            self._running.append(thread)
        try:
            look()
        finally:
            with self._lock:
                self._running.remove(thread)

    async def now_and_then(self, look: Callable[[], None]) -> None:
        """Look without being told, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS + random.random())
            threading.Thread(target=self.run, args=(look,), daemon=True).start()

    def finish(self, seconds: float) -> None:
        """Wait for what runs, as long as it gives its work back."""
        with self._lock:
            running = list(self._running)
        for thread in running:
            thread.join(seconds)
