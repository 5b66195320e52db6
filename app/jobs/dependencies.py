"""What endpoints of jobs are given besides `app.dependencies`."""

from typing import Annotated

from fastapi import Depends, Request

from app.jobs.cache import JobCache
from app.jobs.feed import Feed


async def feed(request: Request) -> Feed:
    """The live tails of this process."""
    found: Feed = request.app.state.feed
    return found


async def job_cache(request: Request) -> JobCache:
    """The jobs that this process has shown lately."""
    found: JobCache = request.app.state.job_cache
    return found


LiveFeed = Annotated[Feed, Depends(feed)]
CachedJobs = Annotated[JobCache, Depends(job_cache)]
