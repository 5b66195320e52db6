"""A month of a shared queue, through the real claim code on a simulated clock, and by plain FIFO.

    python bench/queue_simulation.py [--quick] [--seed 0]

Eight teams share 32 GPUs. Jobs come as people send them: by day more than by night, one team in
bursts of whole sweeps, for 1 to 8 GPUs, of every class. A real PostgreSQL holds them; its
`clock_timestamp()` is replaced by ours, so that the service's own code for claims, forecasts,
preemption and ends runs unchanged. FIFO is the same code with another plan: first come first
served, wherever there is room (which starves big jobs).
"""

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table
from sqlalchemy import text, update

import app.scheduling.leases
from app.db.base import new_id
from app.db.engine import create_engine, create_sessions, unit_of_work
from app.db.models import JobRow, SuiteRow, TeamRow
from app.exports.leases import finish_job
from app.lifecycle.jobs import lock_job, switch_status
from app.scheduling.explain import look, waits
from app.scheduling.leases import claim, end_attempt, fenced, requeue
from app.scheduling.plan import plan
from app.scheduling.snapshot import read_snapshot
from app.scheduling.types import Placement
from app.workers.repository import Presence, beat
from dressage.local.servers import EmbeddedDatabases
from dressage.spec.status import AttemptOutcome, JobStatus, WaitReason

START = datetime(2026, 1, 5, tzinfo=UTC)
HOUR, DAY = 3600.0, 86400.0
MACHINES = {"eight-a": 8, "eight-b": 8, "four-a": 4, "four-b": 4, **dict.fromkeys("abcd", 2)}
WEIGHTS = {"one": 2.0, "two": 1.0, "three": 1.0, "four": 1.0, "five": 1.0, "six": 1.0, "seven": 0.5}
BURSTING = "bulk"
CLASSES = ("urgent", "high", "normal", "low")
STARVED_AFTER = 5 * DAY
RELOAD_SECONDS = 60.0  # a preempted job loads its checkpoint again
STEPS = 100

CLOCK = """
CREATE SCHEMA sim;
CREATE TABLE sim.clock (now timestamptz NOT NULL);
INSERT INTO sim.clock VALUES (%s);
CREATE FUNCTION sim.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
    AS 'SELECT now FROM sim.clock';
"""


@dataclass
class SimulatedJob:
    name: str
    team: str
    priority: int
    gpus: int
    arrives: float
    seconds: float
    workload: str
    preemptible: bool
    id: str = ""
    left: float = 0.0
    starts: list[float] = field(default_factory=list)
    ended: float | None = None
    predicted: tuple[float, float] | None = None  # seconds of waiting, when it was sent

    @property
    def waited(self):
        return (self.starts[0] if self.starts else 10 * STARVED_AFTER) - self.arrives


def month(seed, jobs, days):
    """The same jobs for both ways of sharing."""
    rng = random.Random(seed)
    teams = [*WEIGHTS, BURSTING]
    pace = {f"{team}-{n}": rng.lognormvariate(0, 0.7) for team in teams for n in range(4)}
    gpu_seconds = 0.88 * sum(MACHINES.values()) * days * DAY  # offered load
    found, at = [], 0.0
    while len(found) < jobs:
        team = rng.choice(teams)
        count = rng.randint(15, 40) if team == BURSTING and rng.random() < 0.2 else 1
        at = rng.random() * days * DAY
        at -= (at % DAY) * (0.5 if rng.random() < 0.6 else 0)  # more in the first half of a day
        workload = rng.choice([name for name in pace if name.startswith(f"{team}-")])
        priority = rng.choices(range(4), (3, 12, 65, 20))[0]
        for n in range(min(count, jobs - len(found))):
            gpus = rng.choices((1, 2, 4, 8), (65, 20, 10, 5))[0]
            found.append(
                SimulatedJob(
                    name=f"job-{len(found)}",
                    team=team,
                    priority=priority,
                    gpus=gpus if count == 1 else 1,
                    arrives=at + n,
                    seconds=pace[workload] * rng.lognormvariate(0, 0.15),
                    workload=workload,
                    preemptible=priority == 3 or rng.random() < 0.5,
                )
            )
    scale = gpu_seconds / sum(job.seconds * job.gpus for job in found)
    for job in found:
        job.seconds = job.left = max(120.0, job.seconds * scale)
    return sorted(found, key=lambda job: job.arrives)


def first_come_first_served(snapshot):
    """The baseline: no classes, shares, reservations; whoever fits somewhere runs."""
    free = {node.worker_id: node.gpus for node in snapshot.nodes}
    for job in snapshot.running:
        free[job.worker_id] -= job.request.gpus
    found = []
    for position, job in enumerate(sorted(snapshot.waiting, key=lambda j: j.arrival), start=1):
        room = [name for name, gpus in free.items() if gpus >= job.request.gpus]
        name = min(room, key=lambda n: (free[n], n), default=None)
        if name:
            free[name] -= job.request.gpus
        wait_reason = WaitReason.NONE if name else WaitReason.BUSY
        found.append(Placement(job, position, name, wait_reason, ""))
    return found


class Simulation:
    """One way of sharing, from the first job to the last."""

    def __init__(self, sessions, jobs, decide, *, fair):
        self.sessions, self.jobs, self.decide, self.fair = sessions, jobs, decide, fair
        self.by_id = {}
        self.now = 0.0
        self.order = itertools.count()
        self.events = [(job.arrives, next(self.order), "arrives", job, 0) for job in jobs]
        heapq.heapify(self.events)
        self.leases = {}
        self.told = set()
        self.preempted = 0
        # GPU time of each team while it and another one wanted more, and its due part of all.
        self.received, self.due = defaultdict(float), defaultdict(float)
        self.used = 0.0
        self.window = max(job.arrives for job in jobs)

    async def run(self):
        while self.events:
            at, _, what, job, attempt = heapq.heappop(self.events)
            self.account(at)
            self.now = at
            await self.tick_clock()
            if what == "arrives":
                await self.submit(job)
            elif self.leases.get(job.id) and self.leases[job.id].attempt == attempt:
                await (self.finish if what == "ends" else self.give_way)(job)
            if self.events and self.events[0][0] - at < 1:
                continue  # people send a sweep at once
            await self.place()

    def account(self, until):
        """The time since the last event belongs to the state after it."""
        seconds = until - self.now
        running = defaultdict(int)
        for job_id in self.leases:
            running[self.by_id[job_id].team] += self.by_id[job_id].gpus
        counted = max(0.0, min(until, self.window) - self.now)
        self.used += counted * sum(running.values())
        wanting = {j.team for j in self.by_id.values() if not j.ended and j.id not in self.leases}
        if len(wanting) < 2:
            return
        weights = {team: WEIGHTS.get(team, 1.0) for team in wanting}
        for team, weight in weights.items():
            self.received[team] += seconds * running[team]
            self.due[team] += seconds * sum(MACHINES.values()) * weight / sum(weights.values())

    async def tick_clock(self):
        async with unit_of_work(self.sessions) as session:
            now = {"now": self.moment()}
            await session.execute(text("UPDATE sim.clock SET now = :now"), now)
            await session.execute(text("UPDATE workers SET heartbeat_at = :now"), now)
            progress = [
                {
                    "id": job_id,
                    "progress": {
                        "step": int(STEPS * (1 - self.left(job_id) / self.by_id[job_id].seconds)),
                        "total_steps": STEPS,
                        "seconds_per_step": self.by_id[job_id].seconds / STEPS,
                    },
                }
                for job_id in self.leases
            ]
            if progress:
                await session.execute(update(JobRow), progress)

    def left(self, job_id):
        job = self.by_id[job_id]
        return job.left - (self.now - job.starts[-1])

    def moment(self):
        return START + timedelta(seconds=self.now)

    async def submit(self, job):
        job.id = new_id("job")
        self.by_id[job.id] = job
        async with unit_of_work(self.sessions) as session:
            session.add(
                JobRow(
                    id=job.id,
                    team=job.team,
                    name=job.name,
                    status=JobStatus.QUEUED,
                    suite_id="suite_1",
                    spec={
                        "priority": CLASSES[job.priority],
                        "resources": {"gpus": job.gpus, "preemptible": job.preemptible},
                    },
                    adjustments=[],
                    priority=job.priority,
                    gpus=job.gpus,
                    workload=f"{job.workload} {job.gpus}",
                    steps=STEPS,
                    progress={},
                    request_hash="",
                )
            )

    async def place(self):
        async with unit_of_work(self.sessions) as session:
            if self.fair:
                await look(session, explain=False)
                await self.predict(session)
            placements = self.decide(await read_snapshot(session))
        for name in dict.fromkeys(v.worker_id for v in placements if v.worker_id):
            while await self.claim(name):
                pass
        for job_id, lease in self.leases.items():
            job = self.by_id[job_id]
            if (job_id, lease.attempt) not in self.told and await self.asked_to_yield(job_id):
                self.told.add((job_id, lease.attempt))
                # after its current step
                step = self.now + job.seconds / STEPS / 2
                heapq.heappush(self.events, (step, next(self.order), "yields", job, lease.attempt))

    async def asked_to_yield(self, job_id):
        async with unit_of_work(self.sessions) as session:
            job = await session.get_one(JobRow, job_id)
            return job.status == JobStatus.PAUSING

    async def predict(self, session):
        """Ask for the estimate of the jobs that have just come, as `GET /jobs/{id}` would."""
        new = [j for j in self.by_id.values() if not j.starts and not j.predicted]
        new = [j for j in new if j.arrives > self.now - 60]
        if not new:
            return
        snapshot = await read_snapshot(session)
        found = waits(snapshot, plan(snapshot))
        for job in new:
            start = found[job.id].estimated_start if job.id in found else None
            if start:
                ends = (start.earliest, start.latest)
                job.predicted = tuple((end - self.moment()).total_seconds() for end in ends)

    async def claim(self, name):
        async with unit_of_work(self.sessions) as session:
            lease = (await claim(session, name)).lease
            if lease is None:
                return False
            row = await session.get_one(JobRow, lease.job_id)
            await switch_status(session, row, JobStatus.TRAINING)
        job = self.by_id[lease.job_id]
        job.starts.append(self.now)
        self.leases[job.id] = lease
        end = self.now + job.left
        heapq.heappush(self.events, (end, next(self.order), "ends", job, lease.attempt))
        return True

    async def finish(self, job):
        async with unit_of_work(self.sessions) as session:
            row, _ = await fenced(session, self.leases.pop(job.id))
            await end_attempt(session, row, AttemptOutcome.SUCCEEDED)
            await switch_status(session, row, JobStatus.EXPORTING)
            await finish_job(session, row)
        job.ended = self.now

    async def give_way(self, job):
        self.preempted += 1
        job.left = self.left(job.id) + RELOAD_SECONDS
        del self.leases[job.id]
        async with unit_of_work(self.sessions) as session:
            await requeue(session, await lock_job(session, job.id), "yielded")

    def figures(self):
        parts = [self.received[team] / self.due[team] for team in self.due]
        return {
            "utilization": self.used / (sum(MACHINES.values()) * self.window),
            "jain": sum(parts) ** 2 / (len(parts) * sum(part**2 for part in parts)),
            "starved": sum(job.waited > STARVED_AFTER for job in self.jobs),
            "waits": {
                name: fmean(j.waited for j in self.jobs if j.priority == at) / HOUR
                for at, name in enumerate(CLASSES)
            },
            "big_wait": fmean(job.waited for job in self.jobs if job.gpus == 8) / HOUR,
            "longest_wait": max(job.waited for job in self.jobs) / HOUR,
            "preempted": self.preempted,
        }

    def estimates(self):
        """Of jobs that waited for more than ten minutes: relative error, share within the range."""
        known = [job for job in self.jobs if job.predicted and job.waited > 600]
        errors = [abs(fmean(job.predicted) - job.waited) / job.waited for job in known]
        within = [job.predicted[0] <= job.waited <= job.predicted[1] for job in known]
        return median(errors), fmean(within), len(known)


async def simulate(url, jobs, decide, *, fair):
    engine = create_engine("postgresql+psycopg://" + url.split("://", 1)[1])
    sessions = create_sessions(engine)
    app.scheduling.leases.plan = decide
    try:
        async with unit_of_work(sessions) as session:
            for name, weight in {**WEIGHTS, BURSTING: 1.0}.items():
                session.add(TeamRow(name=name, weight=weight))
            session.add(
                SuiteRow(
                    id="suite_1",
                    team=BURSTING,
                    name="s",
                    version=1,
                    content_hash="",
                    storage_key="",
                    case_count=1,
                    tools=[],
                    environments=[],
                    measures=[],
                    reward_functions=[],
                    rollout_funcs=[],
                )
            )
            for name, gpus in MACHINES.items():
                presence = Presence(name, 1, "training", gpus, "GPU", 80.0, [], {})
                await beat(session, name, presence)
        simulation = Simulation(sessions, jobs, decide, fair=fair)
        await simulation.run()
        return simulation
    finally:
        app.scheduling.leases.plan = plan
        await engine.dispose()


@contextlib.contextmanager
def database():
    """A fresh PostgreSQL whose clock is ours."""
    import psycopg

    root = Path(tempfile.mkdtemp(prefix="dressage-simulation-"))
    root.chmod(0o711)
    databases = EmbeddedDatabases(root)
    postgres = databases.postgres
    try:
        databases.start_postgres()
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            for statement in CLOCK.strip().split(";\n"):
                parameters = (START,) if "%s" in statement else None
                connection.execute(statement, parameters)
            connection.execute("ALTER DATABASE dressage SET search_path = sim, pg_catalog")
            connection.execute("ALTER DATABASE dressage SET synchronous_commit = off")
        environment = {
            "DRESSAGE_DATABASE_URL": postgres.url,
            "DRESSAGE_REDIS_URL": "redis://unused",
            "DRESSAGE_STORAGE": str(root),
            "DRESSAGE_RUNS_DIR": str(root),
        }
        subprocess.run(
            [sys.executable, "-m", "app.admin.migrate"],
            env={**os.environ, **environment},
            check=True,
        )
        yield postgres.url
    finally:
        databases.stop()
        shutil.rmtree(root)


def show(fair, fifo, estimates):
    console = Console(width=100)
    table = Table("", "Dressage", "FIFO")
    rows = [
        ("utilization", "utilization", "{:.3f}"),
        ("Jain index of shares while waiting", "jain", "{:.3f}"),
        ("jobs that waited 5 days", "starved", "{}"),
        ("mean wait of 8-GPU jobs, hours", "big_wait", "{:.1f}"),
        ("longest wait, hours", "longest_wait", "{:.1f}"),
        ("preemptions", "preempted", "{}"),
    ]
    for title, key, shape in rows:
        table.add_row(title, shape.format(fair[key]), shape.format(fifo[key]))
    for name in CLASSES:
        waits_ = (f"{figures['waits'][name]:.1f}" for figures in (fair, fifo))
        table.add_row(f"mean wait, class {name}, hours", *waits_)
    console.print(table)
    error, within, count = estimates
    console.print(
        f"estimated start, {count} jobs that waited: median error {error:.0%} of the wait, "
        f"{within:.0%} within the range"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a week instead of a month")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jobs, days = (250, 7.5) if options.quick else (1000, 30.0)
    results = []
    for decide, fair in ((plan, True), (first_come_first_served, False)):
        with database() as url:
            months = month(options.seed, jobs, days)
            results.append(asyncio.run(simulate(url, months, decide, fair=fair)))
    fair, fifo = (simulation.figures() for simulation in results)
    estimates = results[0].estimates()
    show(fair, fifo, estimates)
    print(
        json.dumps(
            {
                "jobs": jobs,
                "gpus": sum(MACHINES.values()),
                "utilization": fair["utilization"],
                "jain": fair["jain"],
                "starved": fair["starved"],
                "fifo_utilization": fifo["utilization"],
                "fifo_jain": fifo["jain"],
                "fifo_starved": fifo["starved"],
                "eta_error": estimates[0],
                "eta_within_range": estimates[1],
                "wait_hours": fair["waits"],
                "fifo_wait_hours": fifo["waits"],
            }
        )
    )


if __name__ == "__main__":
    main()
