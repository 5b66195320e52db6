"""What endpoints of jobs are given besides `app.dependencies`."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request

from app.auth.keys import KeyCache
from app.dependencies import identify, key_in
from app.exceptions import TooManyRequests
from app.jobs.cache import JobCache
from app.jobs.feed import Feed

STREAMS_PER_KEY = 100
TRY_AGAIN_SECONDS = 10.0


class StreamLimiter:
    """Streams of each key, in this process: only so many, and none for longer than the key."""

    def __init__(self, key_cache: KeyCache) -> None:
        self._key_cache = key_cache
        self._open = Counter[str]()

    async def of(self, request: Request, texts: AsyncIterator[str]) -> AsyncIterator[str]:
        """The texts, until they end or the key does."""
        caller = await identify(request)
        secret = key_in(request)
        self._open[caller.key_id] += 1
        try:
            async for text in texts:
                if await self._key_cache.identify(secret) is None:
                    yield 'event: end\ndata: {"reason": "the key is not valid any longer"}\n\n'
                    return
                yield text
        finally:
            self._open[caller.key_id] -= 1

    async def require_room(self, request: Request) -> None:
        """One more stream.

        Raises:
            TooManyRequests: The key has too many open.
        """
        caller = await identify(request)
        if self._open[caller.key_id] >= STREAMS_PER_KEY:
            raise TooManyRequests(
                TRY_AGAIN_SECONDS, f"{STREAMS_PER_KEY} streams of this key are open; close some"
            )


async def feed(request: Request) -> Feed:
    """The live tails of this process."""
    found: Feed = request.app.state.feed
    return found


async def streams(request: Request) -> StreamLimiter:
    """The streams of this process."""
    found: StreamLimiter = request.app.state.streams
    return found


async def job_cache(request: Request) -> JobCache:
    """The jobs that this process has shown lately."""
    found: JobCache = request.app.state.job_cache
    return found


LiveFeed = Annotated[Feed, Depends(feed)]
Streams = Annotated[StreamLimiter, Depends(streams)]
CachedJobs = Annotated[JobCache, Depends(job_cache)]
