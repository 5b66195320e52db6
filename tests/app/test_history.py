"""Much history: lists stay cheap, streams have no gap, and old bulk is forgotten."""

import asyncio
import json
import threading
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import Engine, event

from app.db.engine import create_engine, create_sessions, unit_of_work
from app.jobs.retention import forget_bulk
from app.lifecycle.jobs import EventDraft, append_events
from dressage.spec.event import EventType
from worker.cleaning import remove, runs_to_remove

JOBS, EVENTS_OF_ONE = 30_000, 60_000
FILL = """
INSERT INTO suites (id, team, name, version, content_hash, storage_key, case_count, size, tools,
    environments, measures, reward_functions, rollout_funcs)
VALUES ('suite_x', 'default', 's', 1, 'h', 'k', 1, 1, '[]', '[]', '[]', '[]', '[]');
INSERT INTO jobs (id, team, name, status, suite_id, spec, adjustments, priority, gpus, workload,
    steps, progress, attempts, last_event_seq, request_hash, finished_at)
SELECT 'job_' || n, CASE n % 5 WHEN 0 THEN 'default' ELSE 'other' END, 'name-' || n % 100,
    CASE WHEN n % 50 = 0 THEN 'failed' ELSE 'succeeded' END, 'suite_x', %(spec)s, '[]', 2, 1,
    'w' || n % 50, 10, '{}', 1, 0, 'h', now() - n * interval '1 minute'
FROM generate_series(1, %(jobs)s) n;
INSERT INTO events (job_id, seq, type, data)
SELECT 'job_5', n, (ARRAY['log', 'metrics', 'progress'])[1 + n %% 3],
    jsonb_build_object('step', n, 'values', '{}'::jsonb, 'message', 'x')
FROM generate_series(1, %(events)s) n;
INSERT INTO events (job_id, seq, type, data)
SELECT 'job_' || n, 1, 'status', '{"status": "queued"}' FROM generate_series(6, %(jobs)s) n;
INSERT INTO attempts (id, kind, work_id, job_id, number, team, worker_id, gpus, gpu_indexes,
    lease_token, heartbeats, relayed, outcome, started_at, ended_at)
SELECT 'a' || n, 'train', 'job_' || n, 'job_' || n, 1, 'default', 'w', 1, '[0]', 't' || n, 1, 0,
    'succeeded',
    now() - (n + 10) * interval '1 minute', now() - n * interval '1 minute'
FROM generate_series(1, %(jobs)s) n;
UPDATE jobs SET last_event_seq = %(events)s WHERE id = 'job_5';
"""


@pytest.fixture
def much(api, job_spec, database_url):
    """Tens of thousands of ended jobs, one of them with a long history."""
    spec = json.dumps({**job_spec, "suite": "s@1"})
    with psycopg.connect(database_url, autocommit=True) as connection:
        for statement in FILL.strip().split(";\n"):
            statement = statement.replace("n % ", "n %% ").replace("%%%%", "%%")
            values = {"spec": spec, "jobs": JOBS, "events": EVENTS_OF_ONE}
            connection.execute(statement, values)
        connection.execute("VACUUM ANALYZE")


@pytest.fixture
def plans(database_url):
    """`plans(ask)`: what PostgreSQL did for each statement of a request."""

    def go(ask):
        seen = []

        def note(connection, cursor, statement, parameters, *_):
            if statement.lstrip().startswith(("SELECT", "WITH")) and "pg_advisory" not in statement:
                seen.append((statement, parameters))

        event.listen(Engine, "before_cursor_execute", note)
        try:
            answer = ask()
            assert answer.status_code == 200, answer.text
        finally:
            event.remove(Engine, "before_cursor_execute", note)
        assert seen
        explain = "EXPLAIN (ANALYZE, FORMAT JSON) "
        with psycopg.connect(database_url) as connection:
            found = [connection.execute(explain + s, p).fetchone() for s, p in seen if "FROM" in s]
        assert found
        return [explained[0]["Plan"] for (explained,) in found]

    return go


def nodes(plan):
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


LISTS = [
    "/jobs?limit=50",
    "/jobs?team=default&limit=50",
    "/jobs?team=default&status=failed&limit=50",
    "/jobs?status=succeeded&limit=50",
    "/jobs?name=name-7&limit=50",
    "/jobs?limit=50&cursor=15000",
    "/jobs?status=queued",
    "/jobs/job_77",
    "/jobs/job_5/events?limit=100",
    "/jobs/job_5/events?limit=100&cursor=40000",
    "/jobs/job_5/events?limit=100&type=metrics&cursor=40000",
    "/jobs/job_5/logs?limit=100",
    "/jobs/job_5/rollouts",
    "/queue",
]


@pytest.mark.usefixtures("much")
def test_lists_cost_the_same_however_much_there_is(api, plans):
    for url in LISTS:
        for plan in plans(lambda url=url: api.get(url)):
            for node in nodes(plan):
                table = node.get("Relation Name")
                read = node["Actual Rows"] * node["Actual Loops"]
                read += node.get("Rows Removed by Filter", 0)
                if table in ("jobs", "events", "exports", "artifacts", "rollouts"):
                    assert node["Node Type"] != "Seq Scan" or read < 100, (url, node)
                    # a page, and once as much where one condition is checked on the way
                    assert read <= 600, (url, node["Node Type"], node.get("Index Name"), read)


@pytest.mark.usefixtures("much")
def test_the_bulk_of_old_histories_is_forgotten_and_the_rest_is_kept(api, database_url):
    async def forget():
        engine = create_engine("postgresql+psycopg://" + database_url.split("://", 1)[1])
        sessions = create_sessions(engine)
        total = 0
        while True:
            async with unit_of_work(sessions) as session:
                trimmed = await forget_bulk(session, timedelta(days=20.8))
            if not trimmed:
                await engine.dispose()
                return total
            total += trimmed

    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE jobs SET finished_at = now() - interval '99 days' WHERE id = 'job_5'"
        )
    assert asyncio.run(forget()) == pytest.approx(JOBS - 20.8 * 1440 + 1, abs=2)
    assert asyncio.run(forget()) == 0
    page = api.get("/jobs/job_5/events", params={"limit": 1000}).json()["items"]
    assert {e["type"] for e in page} == {"metrics"}
    assert len(api.get("/jobs/job_5/metrics").json()["items"]) == EVENTS_OF_ONE // 3
    assert api.get("/jobs/job_6/events").json()["items"][0]["type"] == "status"


def test_run_directories_of_ended_and_deleted_jobs_are_removed(
    api, suite, job_spec, database_url, tmp_path
):
    jobs = [api.post("/jobs", json=job_spec).json()["id"] for _ in range(3)]
    api.post(f"/jobs/{jobs[0]}/pause")
    for job in jobs[1:]:
        api.post(f"/jobs/{job}/cancel")
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE jobs SET finished_at = now() - interval '3 days' WHERE id = %s", [jobs[1]]
        )
    runs = tmp_path / "runs"
    for name in (*jobs, "job_0123456789abcdef0123", "job_not-ours", "lost+found"):
        (runs / name / "attempt-1").mkdir(parents=True)

    async def clean():
        engine = create_engine("postgresql+psycopg://" + database_url.split("://", 1)[1])
        async with unit_of_work(create_sessions(engine)) as session:
            remove(await runs_to_remove(session, runs, timedelta(days=2)))
        await engine.dispose()

    asyncio.run(clean())
    left = {path.name for path in runs.iterdir()}
    assert left == {jobs[0], jobs[2], "job_not-ours", "lost+found"}


def frames(response):
    """Numbers of the events in a stream, and whether it said that it ended."""
    lines = response.text.splitlines()
    numbers = [int(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")]
    return numbers, "event: end" in lines


@pytest.mark.parametrize("after", [0, 1, 700, 1501])
def test_followers_get_everything_once_from_wherever_they_begin(
    api, suite, job_spec, database_url, after
):
    job = api.post("/jobs", json=job_spec).json()["id"]
    url = "postgresql+psycopg://" + database_url.split("://", 1)[1]

    async def tell(count):
        engine = create_engine(url, pooled=False)
        for _ in range(count):
            async with unit_of_work(create_sessions(engine)) as session:
                drafts = [EventDraft(EventType.LOG, {"message": "x"}) for _ in range(100)]
                await append_events(session, job, drafts)

    asyncio.run(tell(15))
    answers = []
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
    followers = [
        threading.Thread(
            target=lambda: answers.append(api.get(f"/jobs/{job}/events", headers=headers))
        )
        for _ in range(5)
    ]
    for thread in followers:
        thread.start()
    asyncio.run(tell(20))  # while they follow
    api.post(f"/jobs/{job}/cancel")
    for thread in followers:
        thread.join(30)
    last = api.get(f"/jobs/{job}/events", params={"cursor": 3000, "limit": 1000}).json()["items"][
        -1
    ]
    for answer in answers:
        assert frames(answer) == (list(range(after + 1, last["seq"] + 1)), True)
    assert len(answers) == 5
