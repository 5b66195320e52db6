"""Several calls of a pool at once, for tests that know no event loop."""

import asyncio


def run(pool, calls, timeout):
    """The outcomes of (worker or None, request), in order."""

    async def together():
        return await asyncio.gather(*(pool.call(*call, timeout) for call in calls))

    return asyncio.run(together())
