"""Leases that have stood still for too long, judged by the observer's own clock alone.

A host's clock may jump, and a database may be away for a minute: neither ends a lease. Only time in
which the observer could have seen a heartbeat, and saw none, counts.
"""

import time
from collections.abc import Callable, Mapping


class HeartbeatMonitor:
    """Remembers when each lease was last seen to move."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_seconds, self._clock = lease_seconds, clock
        self._seen: dict[str, tuple[int, float]] = {}

    def silent(self, heartbeats: Mapping[str, int]) -> dict[str, int]:
        """The leases, of all open ones, that have not moved for a whole lease."""
        now = self._clock()
        self._seen = {
            token: self._seen[token] if self._moved_last(token) == count else (count, now)
            for token, count in heartbeats.items()
        }
        return {
            token: count
            for token, (count, since) in self._seen.items()
            if now - since >= self._lease_seconds
        }

    def blind(self) -> None:
        """The database was away: heartbeats could not be seen, so all start anew."""
        self._seen.clear()

    def _moved_last(self, token: str) -> int | None:
        return self._seen[token][0] if token in self._seen else None
