"""Leases, on real transactions."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from app.db.base import new_id
from app.db.engine import create_engine, create_sessions, unit_of_work
from app.db.models import AttemptRow, EventRow, ExportRow, JobRow, SuiteRow
from app.jobs.lifecycle import TRANSITIONS, IllegalTransition, lock_job, switch_status
from app.queue.claim import StaleLease, claim, end_attempt, fenced, heartbeat, reap, release
from app.queue.exports import claim_export, reap_exports, settle_export
from dressage.spec.status import TERMINAL, ExportStatus, JobStatus, Reason


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


async def take(sessions, worker="w", gpus=8, lease_seconds=60.0):
    async with unit_of_work(sessions) as session:
        return await claim(session, worker_id=worker, gpus=gpus, lease_seconds=lease_seconds)


async def expire(sessions):
    async with unit_of_work(sessions) as session:
        past = func.clock_timestamp() - timedelta(seconds=1)
        await session.execute(update(AttemptRow).values(lease_expires_at=past))
        await session.execute(
            update(ExportRow)
            .where(ExportRow.lease_expires_at.is_not(None))
            .values(lease_expires_at=past)
        )


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


def test_priority_then_first_come_first_served(run):
    async def work(sessions):
        low = await add_job(sessions, priority=3)
        first = await add_job(sessions)
        second = await add_job(sessions)
        urgent = await add_job(sessions, priority=0)
        gpu = await add_job(sessions, priority=0, gpus=1)
        taken = [(await take(sessions, gpus=0)).job_id for _ in range(4)]
        assert taken == [urgent, first, second, low]
        assert await take(sessions, gpus=0) is None
        assert (await take(sessions, gpus=1)).job_id == gpu

    run(work)


def test_many_claimers_never_share_a_job(run):
    async def work(sessions):
        ids = {await add_job(sessions) for _ in range(20)}
        leases = await asyncio.gather(*(take(sessions, worker=f"w{n}") for n in range(40)))
        taken = [lease.job_id for lease in leases if lease]
        assert len(taken) == 20
        assert set(taken) == ids

    run(work)


def test_an_expired_lease_goes_to_the_next_worker_and_the_old_one_is_fenced_off(run):
    async def work(sessions):
        job_id = await add_job(sessions)
        old = await take(sessions, "old")
        await expire(sessions)
        async with unit_of_work(sessions) as session:
            assert await reap(session, max_attempts=3) == [job_id]
        assert (await job_of(sessions, job_id)).status == JobStatus.QUEUED
        new = await take(sessions, "new")
        assert (new.job_id, new.attempt) == (job_id, 2)
        for stale in (
            lambda s: heartbeat(s, old, 60),
            lambda s: fenced(s, old),
            lambda s: release(s, old, "x"),
        ):
            with pytest.raises(StaleLease):
                async with unit_of_work(sessions) as session:
                    await stale(session)
        async with unit_of_work(sessions) as session:
            assert await heartbeat(session, new, 60) == JobStatus.PREPARING
            owners = await session.scalars(
                select(AttemptRow.worker_id).where(AttemptRow.ended_at.is_(None))
            )
            assert owners.all() == ["new"]

    run(work)


def test_a_live_lease_is_not_reaped(run):
    async def work(sessions):
        await add_job(sessions)
        await take(sessions)
        async with unit_of_work(sessions) as session:
            assert await reap(session, max_attempts=3) == []

    run(work)


def test_a_job_that_loses_worker_after_worker_fails_with_the_reason(run):
    async def work(sessions):
        job_id = await add_job(sessions)
        for _ in range(3):
            assert await take(sessions)
            await expire(sessions)
            async with unit_of_work(sessions) as session:
                await reap(session, max_attempts=3)
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
            await switch_status(session, await fenced(session, lease), JobStatus.CANCELLING)
        await expire(sessions)
        async with unit_of_work(sessions) as session:
            await reap(session, max_attempts=3)
        assert (await job_of(sessions, job_id)).status == JobStatus.CANCELLED

    run(work)


async def add_exporting_job(sessions, exports):
    job_id = await add_job(sessions, status=JobStatus.EXPORTING)
    async with unit_of_work(sessions) as session:
        session.add_all(
            ExportRow(
                id=new_id("export"),
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
        return await claim_export(session, lease_seconds=60)


def test_the_last_export_ends_the_job_and_a_failed_one_does_not_fail_it(run):
    async def work(sessions):
        job_id = await add_exporting_job(sessions, 2)
        for status in (ExportStatus.FAILED, ExportStatus.SUCCEEDED):
            assert (await job_of(sessions, job_id)).status == JobStatus.EXPORTING
            lease = await take_export(sessions)
            async with unit_of_work(sessions) as session:
                await settle_export(session, lease, status, reason=Reason.COMPLETED)
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
            await expire(sessions)
            async with unit_of_work(sessions) as session:
                assert await reap_exports(session) == [job_id]
        assert await take_export(sessions) is None
        with pytest.raises(StaleLease):
            async with unit_of_work(sessions) as session:
                await settle_export(session, lease, ExportStatus.SUCCEEDED, reason=Reason.COMPLETED)
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
        await add_job(sessions)
        lease = await take(sessions)
        async with unit_of_work(sessions) as session:
            await end_attempt(session, lease, "succeeded")
        async with unit_of_work(sessions) as session:
            await end_attempt(session, lease, "failed")
            outcome = await session.scalar(select(AttemptRow.outcome))
        assert outcome == "succeeded"

    run(work)
