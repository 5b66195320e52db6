"""Server-sent events: replay from Postgres, then follow, without a gap or a repeat.

Every event is read from the database by its number, once for all followers of a job, when Postgres
says (NOTIFY, in the transaction that stored it) that there is one. Neither a restart of the API nor
a lost Redis can drop or double one; a lost notification only means a second of delay.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

import psycopg
import structlog

from app.db.engine import DATABASE_UNAVAILABLE, Sessions, unit_of_work
from app.jobs import repository
from app.lifecycle.jobs import EVENTS_CHANNEL, find_job
from dressage.spec.event import Event, EventType
from dressage.spec.status import TERMINAL, JobStatus

log = structlog.get_logger()

BATCH = 500
WINDOW = 2000  # events of a job kept at hand; a slower follower reads from the database
POLL_SECONDS = 1.0
KEEP_ALIVE_POLLS = 15
SILENCE = ": keep-alive\n\n"
Frame = tuple[int, str, str]  # the event's number, its type, and its text on the wire


class Feed:
    """The events of all jobs that somebody follows at this moment."""

    def __init__(self, sessions: Sessions, database_url: str) -> None:
        self._sessions, self._database_url = sessions, database_url
        self._followed: dict[str, _Followed] = {}

    async def listen(self) -> None:
        """Hear of new events, until cancelled. Reconnects when the database was away."""
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                async with await psycopg.AsyncConnection.connect(
                    self._database_url, autocommit=True, connect_timeout=5
                ) as connection:
                    await connection.execute(f"LISTEN {EVENTS_CHANNEL}")
                    async for notification in connection.notifies():
                        if notification.payload in self._followed:
                            self._followed[notification.payload].bell.set()
            await asyncio.sleep(POLL_SECONDS)

    async def follow(
        self, team: str | None, job_id: str, after: int, kind: EventType | None = None
    ) -> AsyncIterator[str]:
        """Yield a job's events as they come; ends after the last event of a finished job.

        Args:
            team: Who asks; None: an operator.
            job_id: Whose events.
            after: The number of the last one that was seen.
            kind: Only events of this kind.
        """
        yield "retry: 1000\n\n"
        job = self._followed.get(job_id) or _Followed(self._sessions, team, job_id)
        self._followed[job_id] = job
        job.followers += 1
        try:
            async for text in job.texts(after, kind):
                yield text
        finally:
            job.followers -= 1
            if not job.followers and self._followed.get(job_id) is job:
                job.stop()
                del self._followed[job_id]


class _Followed:
    """One job: reads its new events once, for all its followers."""

    def __init__(self, sessions: Sessions, team: str | None, job_id: str) -> None:
        self._sessions, self._team, self._job_id = sessions, team, job_id
        self.bell = asyncio.Event()
        self.followers = 0
        self._window: deque[Frame] = deque(maxlen=WINDOW)
        self._end: int | None = None  # number of the newest event; None before the first look
        self._over = False
        self._news = asyncio.Event()
        self._quiet = 0
        self._reading = asyncio.create_task(self._read())

    def stop(self) -> None:
        """Nobody follows any longer."""
        self._reading.cancel()

    async def texts(self, after: int, kind: EventType | None) -> AsyncIterator[str]:
        """What to send to one follower."""
        while True:
            news = self._news
            frames = await self._after(after)
            if frames:
                after = frames[-1][0]
                yield "".join(text for _, of, text in frames if kind in (None, of)) or SILENCE
            elif self._over:
                yield "event: end\ndata: {}\n\n"
                return
            else:
                await news.wait()
                if self._quiet and self._quiet % KEEP_ALIVE_POLLS == 0:
                    yield SILENCE

    async def _after(self, after: int) -> list[Frame]:
        if self._window and after >= self._window[0][0] - 1:
            first = after - self._window[0][0] + 1
            return [self._window[at] for at in range(first, len(self._window))]
        if self._end is not None and after >= self._end:
            return []
        frames, _ = await self._load(after)
        return frames

    async def _read(self) -> None:
        while not self._over:
            self.bell.clear()
            try:
                await self._look()
            except DATABASE_UNAVAILABLE as error:
                log.warning("feed.database", error=str(error).splitlines()[:1])
                await asyncio.sleep(POLL_SECONDS)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.bell.wait(), POLL_SECONDS)

    async def _look(self) -> None:
        frames, ended_at = await self._load(self._end)
        if self._end is None:
            self._end = ended_at[1]
        self._window.extend(frames)
        if frames:
            self._end = frames[-1][0]
        self._over = ended_at[0] and self._end >= ended_at[1]
        self._quiet = 0 if frames else self._quiet + 1
        if frames or self._over or self._quiet % KEEP_ALIVE_POLLS == 0 or self._quiet == 1:
            waiting, self._news = self._news, asyncio.Event()
            waiting.set()
        if len(frames) == BATCH:
            self.bell.set()

    async def _load(self, after: int | None) -> tuple[list[Frame], tuple[bool, int]]:
        """Events after a number (None: none), whether the job has ended, its last number."""
        async with unit_of_work(self._sessions) as session:
            # The job first: events that come between the two queries only make the page longer.
            job = await find_job(session, self._team, self._job_id)
            rows = (
                await repository.events(session, self._job_id, after=after, limit=BATCH)
                if after is not None
                else []
            )
        frames = [
            (
                row.seq,
                row.type,
                f"id: {row.seq}\nevent: {row.type}\n"
                f"data: {Event.model_validate(row).model_dump_json()}\n\n",
            )
            for row in rows
        ]
        if job is None:  # deleted
            return frames, (True, after or 0)
        return frames, (JobStatus(job.status) in TERMINAL, job.last_event_seq)
