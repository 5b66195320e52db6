"""One job as JSON, for the many who ask how it is: built again only when it has changed."""

from collections import OrderedDict
from typing import Any

from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.db.engine import Sessions, unit_of_work
from app.exceptions import NotFound
from app.jobs.serialize import serialize_jobs
from app.lifecycle.jobs import find_job
from dressage.spec.status import JobStatus

KEPT = 2000
VERSION = (
    "SELECT team, last_event_seq, waiting ->> 'looked_at' AS looked_at FROM jobs WHERE id = %s"
)
Version = tuple[int, Any]


class JobCache:
    """Remembers what was shown last, with the version of the job that it shows.

    Everything that changes a job writes an event; what it waits for has a time of its own.
    """

    def __init__(self, reading: AsyncEngine, sessions: Sessions) -> None:
        self._reading, self._sessions = reading, sessions
        self._kept: OrderedDict[str, tuple[Version, bytes]] = OrderedDict()

    async def json(self, team: str | None, job_id: str) -> bytes:
        """A job as it is now.

        Raises:
            NotFound: There is no such job, or it is another team's.
        """
        found = await self._version(job_id)
        if found is None or team not in (None, found.team):
            raise NotFound(f"there is no job {job_id!r}")
        version = (found.last_event_seq, found.looked_at)
        kept = self._kept.get(job_id)
        if kept and kept[0] == version:
            self._kept.move_to_end(job_id)
            return kept[1]
        async with unit_of_work(self._sessions) as session:
            job = await find_job(session, team, job_id)
            if job is None:
                raise NotFound(f"there is no job {job_id!r}")
            # Of the row that is shown: it may have changed since we looked.
            version = (job.last_event_seq, (job.waiting or {}).get("looked_at"))
            explained = job.status != JobStatus.QUEUED or job.waiting is not None
            text = (await serialize_jobs(session, [job]))[0].model_dump_json().encode()
        if explained:
            self._kept[job_id] = (version, text)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return text

    async def _version(self, job_id: str) -> Any:
        try:
            return await self._read_version(job_id)
        except OperationalError:  # a connection from before a restart of the server
            return await self._read_version(job_id)

    async def _read_version(self, job_id: str) -> Any:
        async with self._reading.connect() as connection:
            # The most frequent statement of all: as text, it costs half as much.
            found = await connection.exec_driver_sql(VERSION, (job_id,))
            return found.one_or_none()
