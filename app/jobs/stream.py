"""Server-sent events: replay from Postgres, then follow, without a gap or a repeat.

Every event is read from the database by its number, so neither a restart of the API nor a lost
Redis can drop or double one.
"""

import asyncio
from collections.abc import AsyncIterator

from app.db.engine import Sessions, unit_of_work
from app.jobs import repository
from app.jobs.views import event_view
from dressage.spec.status import TERMINAL, JobStatus

BATCH = 500
POLL_SECONDS = 0.3
KEEP_ALIVE_POLLS = 50


async def follow(sessions: Sessions, team: str, job_id: str, after: int) -> AsyncIterator[str]:
    """Yield a job's events as they come; ends after the last event of a finished job."""
    yield "retry: 1000\n\n"
    quiet = 0
    while True:
        async with unit_of_work(sessions) as session:
            job = await repository.get(session, team, job_id)
            rows = await repository.events(session, job_id, after=after, limit=BATCH)
        for row in rows:
            after = row.seq
            yield f"id: {row.seq}\nevent: {row.type}\ndata: {event_view(row).model_dump_json()}\n\n"
        if len(rows) == BATCH:
            continue
        if job is None or (JobStatus(job.status) in TERMINAL and after >= job.last_event_seq):
            yield "event: end\ndata: {}\n\n"
            return
        quiet = 0 if rows else quiet + 1
        if quiet and quiet % KEEP_ALIVE_POLLS == 0:
            yield ": keep-alive\n\n"
        await asyncio.sleep(POLL_SECONDS)
