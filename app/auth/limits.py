"""How often one may ask this process: a token bucket for each key, a count without a key."""

import time
from collections import Counter
from collections.abc import Callable

from app.auth.keys import Caller
from app.exceptions import TooManyRequests

BURST_SECONDS = 10.0  # of its rate that a rested key may ask at once
REFUSALS_PER_MINUTE = 600


class RefusalLimiter:
    """Allows so many requests without a valid key to each address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minute, self._counted = 0, Counter[str]()

    def count(self, address: str) -> None:
        """One more.

        Raises:
            TooManyRequests: With the seconds to wait.
        """
        now = self._clock()
        if int(now // 60) != self._minute:
            self._minute, self._counted = int(now // 60), Counter()
        self._counted[address] += 1
        if self._counted[address] > REFUSALS_PER_MINUTE:
            raise TooManyRequests(60 - now % 60)


class RateLimiter:
    """Allows so many requests a minute to each key; 0 is no limit."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._left: dict[str, tuple[float, float]] = {}

    def count(self, caller: Caller) -> None:
        """One more request.

        Raises:
            TooManyRequests: With the seconds to wait.
        """
        rate = (caller.requests_per_minute or self._per_minute) / 60
        if not rate:
            return
        now, burst = self._clock(), max(1.0, rate * BURST_SECONDS)
        left, at = self._left.get(caller.key_id, (burst, now))
        left = min(burst, left + (now - at) * rate)
        if left < 1:
            raise TooManyRequests((1 - left) / rate)
        self._left[caller.key_id] = (left - 1, now)
