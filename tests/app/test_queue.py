"""Leases, on real transactions."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from app.db.base import new_id
from app.db.engine import DATABASE_UNAVAILABLE, create_engine, create_sessions, unit_of_work
from app.db.models import AttemptRow, EventRow, ExportRow, JobRow, SuiteRow, WorkerRow
from app.exports.leases import claim_export, reap_exports, settle_export
from app.lifecycle.jobs import TRANSITIONS, IllegalTransition, lock_job, switch_status
from app.scheduling.explain import waiting_for
from app.scheduling.heartbeats import HeartbeatMonitor
from app.scheduling.leases import (
    StaleLease,
    claim,
    end_attempt,
    fenced,
    heartbeat,
    open_leases,
    reap,
    release,
)
from app.scheduling.retries import RetryPolicy
from app.scheduling.snapshot import LOOKED_AT
from app.workers.repository import beat, every, forget_silent
from dressage.spec.status import (
    TERMINAL,
    AttemptOutcome,
    ExportStatus,
    JobStatus,
    Reason,
    WorkerState,
)
from tests.workers import presence


@pytest.fixture
def run(database_url):
    """Run a coroutine function that gets sessions."""
    url = "postgresql+psycopg://" + database_url.split("://", 1)[1]

    def go(work):
        async def inside():
            engine = create_engine(url)
            try:
                return await work(create_sessions(engine))
            finally:
                await engine.dispose()

        return asyncio.run(inside())

    return go


async def add_job(sessions, **values):
    async with unit_of_work(sessions) as session:
        suite = await session.scalar(select(SuiteRow))
        if suite is None:
            suite = SuiteRow(
                id=new_id("suite"),
                team="default",
                name="s",
                version=1,
                content_hash="h",
                storage_key="k",
                case_count=1,
                tools=[],
                measures=[],
                environments=[],
                reward_functions=[],
                rollout_funcs=[],
            )
            session.add(suite)
            await session.flush()
        job = JobRow(
            **{
                "id": new_id("job"),
                "team": "default",
                "name": "j",
                "status": JobStatus.QUEUED,
                "suite_id": suite.id,
                "spec": {},
                "adjustments": [],
                "priority": 2,
                "gpus": 0,
                "progress": {},
                "request_hash": "h",
                **values,
            }
        )
        session.add(job)
        await session.flush()
        return job.id


async def take(sessions, worker="w", **node):
    """The lease that a live worker gets, if any."""
    async with unit_of_work(sessions) as session:
        await beat(session, worker, presence(**node))
    async with unit_of_work(sessions) as session:
        return (await claim(session, worker)).lease


POLICY = RetryPolicy()


async def lose(sessions, policy=RetryPolicy(back_off_seconds=0)):  # noqa: B008
    """End every lease, as if it had stood still; the jobs concerned."""
    async with unit_of_work(sessions) as session:
        return await reap(session, await open_leases(session), policy)


async def job_of(sessions, job_id):
    async with unit_of_work(sessions) as session:
        return await session.get_one(JobRow, job_id)


@pytest.mark.parametrize("start", list(JobStatus))
@pytest.mark.parametrize("to", list(JobStatus))
def test_the_whole_transition_table(run, start, to):
    async def work(sessions):
        job_id = await add_job(sessions, status=start)
        async with unit_of_work(sessions) as session:
            job = await lock_job(session, job_id)
            if to not in TRANSITIONS[start]:
                with pytest.raises(IllegalTransition):
                    await switch_status(session, job, to)
                return
            await switch_status(session, job, to, reason=Reason.COMPLETED)
            event = await session.scalar(select(EventRow).where(EventRow.job_id == job_id))
            assert (event.seq, event.data["status"]) == (1, to)
            assert (job.finished_at is not None) == (to in TERMINAL)

    run(work)


def test_nothing_leaves_a_terminal_state():
    assert all(not TRANSITIONS[status] for status in TERMINAL)
    assert set(TRANSITIONS) == set(JobStatus)


def test_class_then_first_come_first_served(run):
    async def work(sessions):
        low = await add_job(sessions, priority=3)
        first = await add_job(sessions)
        second = await add_job(sessions)
        urgent = await add_job(sessions, priority=0)
        gpu = await add_job(sessions, priority=0, gpus=1)
        taken = [(await take(sessions, f"w{n}")).job_id for n in range(4)]
        assert taken == [urgent, first, second, low]
        assert await take(sessions, "w9") is None
        assert (await take(sessions, "g", gpus=1)).job_id == gpu

    run(work)


def test_a_worker_runs_as_many_jobs_as_it_has_gpus_each_on_its_own(run):
    async def work(sessions):
        for gpus in (2, 1, 1, 1):
            await add_job(sessions, gpus=gpus)
        leases = [await take(sessions, "w", gpus=4) for _ in range(4)]
        assert [lease.gpu_indexes for lease in leases if lease] == [(0, 1), (2,), (3,)]
        assert leases[3] is None
        async with unit_of_work(sessions) as session:
            await release(session, leases[1], "x")
        again = await take(sessions, "w", gpus=4)
        assert (again.job_id, again.gpu_indexes) == (leases[1].job_id, (2,))

    run(work)


def test_a_worker_that_looks_is_told_who_else_should(run):
    async def work(sessions):
        for name, gpus in (("big", 4), ("small", 1)):
            async with unit_of_work(sessions) as session:
                await beat(session, name, presence(gpus=gpus))
        await add_job(sessions, gpus=1)
        async with unit_of_work(sessions) as session:
            found = await claim(session, "big")
        assert (found.lease, found.others) == (None, ("small",))  # the tightest one that fits

    run(work)


def test_also_a_job_far_back_knows_its_place(run):
    async def work(sessions):
        jobs = [await add_job(sessions, gpus=1) for _ in range(LOOKED_AT + 5)]
        async with unit_of_work(sessions) as session:
            last = await session.get_one(JobRow, jobs[-1])
            found = (await waiting_for(session, [last]))[last.id]
        assert (found.position, found.reason) == (105, "behind 104 queued jobs of its team")

    run(work)


def test_a_worker_that_is_stopped_while_it_claims_does_not_stop_the_others(
    run, database_url, monkeypatch
):
    monkeypatch.setattr("app.db.engine.IDLE_SECONDS", 1)
    url = "postgresql+psycopg://" + database_url.split("://", 1)[1]

    async def work(sessions):
        job_id = await add_job(sessions)
        engine = create_engine(url, pooled=False)
        async with create_sessions(engine)() as stopped:
            await claim(stopped, "stopped")  # holds the claim lock, and does not go on
            assert (await take(sessions, "awake")).job_id == job_id
            with pytest.raises(DATABASE_UNAVAILABLE):  # when it wakes: as if the database was away
                await claim(stopped, "stopped")

    run(work)


def test_a_second_worker_of_the_host_makes_nobody_forgotten_and_a_heartbeat_resets_no_state(run):
    async def work(sessions):
        for name in ("first", "second"):  # in other namespaces: the same host, the same pid
            async with unit_of_work(sessions) as session:
                await beat(session, name, presence())
            async with unit_of_work(sessions) as session:
                (await session.get_one(WorkerRow, name)).state = WorkerState.DRAINING
            async with unit_of_work(sessions) as session:
                await beat(session, name, presence())
                await forget_silent(session)
        async with unit_of_work(sessions) as session:
            assert [row.state for row in await every(session)] == ["draining", "draining"]
            silent = update(WorkerRow).where(WorkerRow.id == "first")
            hour = func.clock_timestamp() - timedelta(hours=1)
            await session.execute(silent.values(heartbeat_at=hour, state=WorkerState.ACTIVE))
            await forget_silent(session)
            assert [row.id for row in await every(session)] == ["second"]

    run(work)


def test_many_claimers_never_share_a_job(run):
    async def work(sessions):
        ids = {await add_job(sessions, gpus=1) for _ in range(100)}
        for n in range(25):
            async with unit_of_work(sessions) as session:
                await beat(session, f"w{n}", presence(gpus=4))

        async def look(n):
            async with unit_of_work(sessions) as session:
                return (await claim(session, f"w{n % 25}")).lease

        leases = await asyncio.gather(*(look(n) for n in range(200)))
        taken = [lease.job_id for lease in leases if lease]
        assert len(taken) == 100
        assert set(taken) == ids
        async with unit_of_work(sessions) as session:
            held = await session.execute(select(AttemptRow.worker_id, AttemptRow.gpu_indexes))
        assert len({(worker, *indexes) for worker, indexes in held}) == 100

    run(work)


def test_an_expired_lease_goes_to_the_next_worker_and_the_old_one_is_fenced_off(run):
    async def work(sessions):
        job_id = await add_job(sessions)
        old = await take(sessions, "old")
        assert await lose(sessions) == [job_id]
        assert (await job_of(sessions, job_id)).status == JobStatus.QUEUED
        new = await take(sessions, "new")
        assert (new.job_id, new.attempt) == (job_id, 2)
        for stale in (
            lambda s: heartbeat(s, old),
            lambda s: fenced(s, old),
            lambda s: release(s, old, "x"),
        ):
            with pytest.raises(StaleLease):
                async with unit_of_work(sessions) as session:
                    await stale(session)
        async with unit_of_work(sessions) as session:
            assert await heartbeat(session, new) == JobStatus.PREPARING
            owners = await session.scalars(
                select(AttemptRow.worker_id).where(AttemptRow.ended_at.is_(None))
            )
            assert owners.all() == ["new"]

    run(work)


def test_a_lease_that_moves_is_not_reaped(run):
    async def work(sessions):
        await add_job(sessions)
        lease = await take(sessions)
        async with unit_of_work(sessions) as session:
            seen = await open_leases(session)
        async with unit_of_work(sessions) as session:
            await heartbeat(session, lease)
        async with unit_of_work(sessions) as session:
            assert await reap(session, seen, RetryPolicy()) == []

    run(work)


def test_silence_is_measured_by_the_observers_clock_alone():
    now = 0.0
    watch = HeartbeatMonitor(10, clock=lambda: now)
    assert watch.silent({"a": 1, "b": 1}) == {}
    now = 9.0
    assert watch.silent({"a": 2, "b": 1}) == {}
    now = 11.0
    assert watch.silent({"a": 2, "b": 1}) == {"b": 1}
    watch.blind()  # the database was away
    now = 100.0
    assert watch.silent({"a": 2, "b": 1}) == {}
    now = 110.0
    assert watch.silent({"a": 2}) == {"a": 2}


def test_accidents_are_tried_again_later_each_time(run):
    async def work(sessions):
        policy = RetryPolicy(max_attempts=4, back_off_seconds=1000)
        job_id = await add_job(sessions)
        waits = []
        for _ in range(3):
            assert await take(sessions)
            await lose(sessions, policy)
            job = await job_of(sessions, job_id)
            waits.append(job.message.rsplit("; ", 1)[1])
            if job.not_before:
                assert await take(sessions) is None
                async with unit_of_work(sessions) as session:
                    await session.execute(update(JobRow).values(not_before=None))
        assert waits == ["queued again", "tried again in 1000 s", "tried again in 3000 s"]

    run(work)


def test_a_job_that_loses_worker_after_worker_fails_with_the_reason(run):
    async def work(sessions):
        job_id = await add_job(sessions)
        for _ in range(3):
            assert await take(sessions)
            await lose(sessions)
        job = await job_of(sessions, job_id)
        assert (job.status, job.reason) == (JobStatus.FAILED, Reason.WORKER_LOST)

    run(work)


def test_a_worker_that_is_stopped_gives_the_job_back_without_a_failed_try(run):
    async def work(sessions):
        job_id = await add_job(sessions)
        for _ in range(5):
            lease = await take(sessions)
            async with unit_of_work(sessions) as session:
                await release(session, lease, "stopped")
        assert (await job_of(sessions, job_id)).status == JobStatus.QUEUED

    run(work)


def test_a_cancelled_job_whose_worker_is_lost_ends_cancelled(run):
    async def work(sessions):
        job_id = await add_job(sessions)
        lease = await take(sessions)
        async with unit_of_work(sessions) as session:
            job, _ = await fenced(session, lease)
            await switch_status(session, job, JobStatus.CANCELLING)
        await lose(sessions)
        assert (await job_of(sessions, job_id)).status == JobStatus.CANCELLED

    run(work)


async def add_exporting_job(sessions, exports):
    job_id = await add_job(sessions, status=JobStatus.EXPORTING)
    async with unit_of_work(sessions) as session:
        session.add_all(
            ExportRow(
                id=new_id("export"),
                kind="export",
                job_id=job_id,
                name=f"e{n}",
                spec={},
                status=ExportStatus.QUEUED,
            )
            for n in range(exports)
        )
    return job_id


async def take_export(sessions):
    async with unit_of_work(sessions) as session:
        found = await claim_export(session, "exporter")
        return found and found.lease


def test_the_last_export_ends_the_job_and_a_failed_one_does_not_fail_it(run):
    async def work(sessions):
        job_id = await add_exporting_job(sessions, 2)
        for status in (ExportStatus.FAILED, ExportStatus.SUCCEEDED):
            assert (await job_of(sessions, job_id)).status == JobStatus.EXPORTING
            lease = await take_export(sessions)
            async with unit_of_work(sessions) as session:
                await settle_export(session, lease, status, POLICY, reason=Reason.COMPLETED)
        job = await job_of(sessions, job_id)
        assert job.status == JobStatus.SUCCEEDED
        assert job.message == "trained; these exports failed: e0"

    run(work)


def test_an_export_is_tried_three_times_when_its_workers_are_lost(run):
    async def work(sessions):
        job_id = await add_exporting_job(sessions, 1)
        for attempt in (1, 2, 3):
            lease = await take_export(sessions)
            assert lease.attempt == attempt
            async with unit_of_work(sessions) as session:
                assert await reap_exports(session, await open_leases(session), POLICY) == [job_id]
        assert await take_export(sessions) is None
        with pytest.raises(StaleLease):
            async with unit_of_work(sessions) as session:
                await settle_export(
                    session, lease, ExportStatus.SUCCEEDED, POLICY, reason=Reason.COMPLETED
                )
        assert (await job_of(sessions, job_id)).status == JobStatus.SUCCEEDED

    run(work)


def test_exports_wait_until_training_is_over(run):
    async def work(sessions):
        job_id = await add_exporting_job(sessions, 1)
        async with unit_of_work(sessions) as session:
            await session.execute(update(JobRow).values(status=JobStatus.TRAINING))
        assert await take_export(sessions) is None
        assert job_id

    run(work)


def test_an_attempt_that_ended_cannot_be_ended_again(run):
    async def work(sessions):
        job_id = await add_job(sessions)
        assert await take(sessions)
        for outcome in (AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED):
            async with unit_of_work(sessions) as session:
                await end_attempt(session, await lock_job(session, job_id), outcome)
        async with unit_of_work(sessions) as session:
            outcome = await session.scalar(select(AttemptRow.outcome))
        assert outcome == "succeeded"

    run(work)
