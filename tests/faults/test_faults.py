"""Whatever dies: no job is lost, none has two owners, nothing is left running.

Every process is real; only the training child is scripted: its steps take a tenth of a second.
"""

import hashlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from app.broker.celery import create_celery
from app.broker.wake import Queue, wake
from dressage.client import ServiceUnreachable
from dressage.spec.status import JobStatus
from tests.faults.conftest import LEASE_SECONDS
from tests.waiting import wait_for


@pytest.fixture
def submit(client, job_spec):
    def go(script, **changes):
        return client.submit({**job_spec, "name": script, **changes}).id

    return go


@pytest.fixture
def started(client, submit):
    """A job of so many steps, when it has taken some."""

    def go(steps, **changes):
        job_id = submit(f"steps {steps}", **changes)
        wait_for(lambda: client.job(job_id).progress.step >= 3, 30)
        return job_id

    return go


def finished(client, job_id, seconds=60):
    def ended():
        try:
            job = client.job(job_id)
        except (ServiceUnreachable, httpx2.HTTPError):
            return None
        return job if job.finished_at else None

    return wait_for(ended, seconds)


def outcomes(cluster, job_id):
    return [outcome for outcome, *_ in cluster.attempts(job_id)]


def assert_sound(cluster, client, job_id, *, steps=None, status=JobStatus.SUCCEEDED):
    """The end that was wanted; one owner at a time; events and files whole; nothing left over."""
    job = finished(client, job_id)
    assert (job.status, job.message) == (status, job.message)
    times = [(start, end) for _, start, end, _ in cluster.attempts(job_id)]
    assert all(end is not None for _, end in times)
    assert all(end <= start for (_, end), (start, _) in pairwise(times))
    events = list(client.follow(job_id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    owners = [e.data["attempt"] for e in events if e.data.get("status") == "preparing"]
    assert owners == sorted(set(owners)) == list(range(1, len(times) + 1))
    if steps:
        taken = [event.data["step"] for event in events if event.type == "progress"]
        assert taken == list(range(1, steps + 1)), "a step is missing, or came twice"
    if job.name.startswith("steps") and status is JobStatus.SUCCEEDED:
        total = int(job.name.split()[1])
        assert [row.step for row in client.metrics(job_id).items] == list(range(1, total + 1))
    for artifact in job.artifacts:
        path = cluster.root / "artifacts" / "objects" / artifact.sha256[:2] / artifact.sha256
        assert hashlib.sha256(path.read_bytes()).hexdigest() == artifact.sha256
    assert len(job.artifacts) == (1 if status is JobStatus.SUCCEEDED else 0)
    wait_for(lambda: not cluster.processes_of(job_id), 15)
    return job


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_the_training_child_is_ended_by_a_signal(cluster, client, started, number):
    job_id = started(40)
    os.kill(child_of(cluster, job_id), number)
    # An accident, as the kernel has killed nothing for memory: on from the checkpoint, as it was.
    job = assert_sound(cluster, client, job_id)
    assert outcomes(cluster, job_id) == ["killed", "succeeded"]
    assert not [a for a in job.adjustments if "micro-batch" in a.reason]
    worker = cluster.running["worker"].pid
    assert not list(Path(tempfile.gettempdir()).glob(f"dressage-run-{worker}-*"))


def test_everything_is_told_to_stop_at_once(cluster, client, started):
    """What `systemctl stop` does unless it is told better."""
    job_id = started(40)
    os.kill(child_of(cluster, job_id), signal.SIGTERM)
    cluster.kill("worker", signal.SIGTERM)
    assert client.job(job_id).status is JobStatus.QUEUED
    cluster.start_worker()
    assert_sound(cluster, client, job_id)
    assert outcomes(cluster, job_id) == ["released", "succeeded"]


def test_postgres_can_only_be_read_for_a_while(cluster, client, started):
    job_id = started(60)
    cluster.let_postgres_write(allowed=False)
    headers = {"Authorization": f"Bearer {cluster.key}"}
    refused = httpx2.post(f"{cluster.url}/jobs/{job_id}/cancel", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable")
    wait_for(lambda: httpx2.get(f"{cluster.url}/readyz").status_code == 503)
    time.sleep(0.4 * LEASE_SECONDS)
    cluster.let_postgres_write(allowed=True)
    assert_sound(cluster, client, job_id, steps=60)
    assert outcomes(cluster, job_id) == ["succeeded"]
    wait_for(lambda: httpx2.get(f"{cluster.url}/readyz").status_code == 200)
    alive = "SELECT 1 FROM workers WHERE heartbeat_at > clock_timestamp() - interval '6 seconds'"
    wait_for(lambda: cluster.query(alive))


def test_valkey_takes_no_messages_and_has_junk(cluster, client, submit):
    redis = cluster.redis()
    redis.lpush("training", "{no message", b"\xff\xfe")
    redis.lpush("training", '{"body": 5}', "[]")
    assert_sound(cluster, client, submit("steps 3"), steps=3)
    redis.config_set("maxmemory", "1")
    redis.config_set("maxmemory-policy", "noeviction")
    try:
        assert httpx2.get(f"{cluster.url}/readyz").json()["checks"]["broker"] != "ok"
        assert_sound(cluster, client, submit("steps 3"), steps=3)  # found without a bell
    finally:
        redis.config_set("maxmemory", "0")
    assert cluster.running["worker"].poll() is None


def test_the_worker_is_killed(cluster, client, started):
    job_id = started(40)
    cluster.kill("worker")
    wait_for(lambda: not cluster.processes_of(job_id), 5)
    cluster.start_worker()
    assert_sound(cluster, client, job_id)
    assert outcomes(cluster, job_id) == ["lost", "succeeded"]


def test_the_worker_is_stopped_in_good_order(cluster, client, started):
    job_id = started(40)
    cluster.kill("worker", signal.SIGTERM)
    wait_for(lambda: not cluster.processes_of(job_id), 5)
    assert client.job(job_id).status is JobStatus.QUEUED
    cluster.start_worker()
    assert_sound(cluster, client, job_id)
    assert outcomes(cluster, job_id) == ["released", "succeeded"]


def test_the_api_is_killed_after_the_commit_and_before_the_ring(cluster, client, submit):
    cluster.signal("valkey", signal.SIGSTOP)  # the ring waits
    lost = []
    thread = threading.Thread(target=lambda: lost.append(_try(submit)))
    thread.start()
    wait_for(lambda: cluster.query("SELECT id FROM jobs WHERE name = 'steps 5'"))
    cluster.kill("api")
    cluster.signal("valkey", signal.SIGCONT)
    thread.join(30)
    assert lost == [None]  # the caller has no answer
    cluster.start_api()
    ((job_id,),) = cluster.query("SELECT id FROM jobs WHERE name = 'steps 5'")
    assert_sound(cluster, client, job_id, steps=5)


def _try(submit):
    try:
        return submit("steps 5")
    except ServiceUnreachable:
        return None


@pytest.mark.parametrize("name", ["api", "scheduler", "valkey", "postgres"])
def test_a_service_process_is_killed(cluster, client, started, submit, name):
    job_id = started(30)
    cluster.kill(name)
    time.sleep(0.5)
    getattr(cluster, f"start_{name}")()
    wait_for(lambda: _reachable(client))
    second = submit("steps 3")
    assert_sound(cluster, client, job_id, steps=30)
    assert outcomes(cluster, job_id) == ["succeeded"]
    assert_sound(cluster, client, second, steps=3)


def _reachable(client):
    try:
        return client.jobs(limit=1)
    except Exception:  # noqa: BLE001  whatever it says while it comes up
        return None


def test_valkey_is_wiped(cluster, client, started, submit):
    job_id = started(20)
    waiting = submit("steps 3")
    cluster.redis().flushall()
    assert_sound(cluster, client, job_id, steps=20)
    assert_sound(cluster, client, waiting, steps=3)
    assert outcomes(cluster, job_id) == ["succeeded"]


def test_postgres_is_away_for_most_of_a_lease_while_a_job_trains(cluster, client, started):
    job_id = started(60)
    cluster.signal_postgres(signal.SIGSTOP)
    time.sleep(0.6 * LEASE_SECONDS)
    cluster.signal_postgres(signal.SIGCONT)
    # Training went on; what it wrote meanwhile arrived late, whole and in order.
    assert_sound(cluster, client, job_id, steps=60)
    assert outcomes(cluster, job_id) == ["succeeded"]


def test_a_worker_that_sleeps_longer_than_its_lease_ends_its_child_and_writes_nothing(
    cluster, client, started
):
    job_id = started(150)
    stale = child_of(cluster, job_id)
    cluster.signal("worker", signal.SIGSTOP)
    cluster.start_worker("other")
    wait_for(lambda: len(cluster.attempts(job_id)) == 2, 4 * LEASE_SECONDS)
    cluster.signal("worker", signal.SIGCONT)
    wait_for(lambda: not alive(stale), 10)
    assert_sound(cluster, client, job_id)
    assert outcomes(cluster, job_id) == ["lost", "succeeded"]
    first, second = (worker for *_, worker in cluster.attempts(job_id))
    assert first != second


@pytest.mark.parametrize("jump", ["1 hour", "-1 hour"])
def test_the_clock_jumps(cluster, client, started, jump):
    job_id = started(40)
    cluster.query("UPDATE moved.clock SET ahead = ahead + %s::interval", jump)
    try:
        assert finished(client, job_id).status is JobStatus.SUCCEEDED
        assert outcomes(cluster, job_id) == ["succeeded"]
        steps = [e.data["step"] for e in client.follow(job_id) if e.type == "progress"]
        assert steps == list(range(1, 41))
        assert not cluster.processes_of(job_id)
    finally:
        cluster.query("UPDATE moved.clock SET ahead = '0'")


def test_one_message_delivered_fifty_times(cluster, client, submit):
    celery = create_celery(cluster.celery_url)
    job_id = submit("steps 20")
    for _ in range(50):
        wake(celery, Queue.TRAINING)
    assert_sound(cluster, client, job_id, steps=20)
    assert outcomes(cluster, job_id) == ["succeeded"]


def test_a_child_that_ignores_the_order_to_end(cluster, client, submit):
    job_id = submit("hang stubbornly")
    wait_for(lambda: client.job(job_id).progress.step)
    client.cancel(job_id)
    asked = time.monotonic()
    assert finished(client, job_id, 15).status is JobStatus.CANCELLED
    assert time.monotonic() - asked < 10
    assert_sound(cluster, client, job_id, status=JobStatus.CANCELLED)


@pytest.mark.parametrize(("script", "type_", "count"), [("flood", "log", 100_000)])
def test_a_child_that_floods_events(cluster, client, submit, script, type_, count):
    job_id = submit(script)
    job = finished(client, job_id, 120)
    assert job.status is JobStatus.SUCCEEDED
    (counted,) = cluster.query(
        "SELECT count(*), count(DISTINCT data->>'message'), max(seq) - min(seq) + 1 "
        "FROM events WHERE job_id = %s AND type = %s",
        *(job_id, type_),
    )
    assert counted == (count, count, count)


def test_a_torn_line(cluster, client, submit):
    job_id = submit("torn line")
    assert_sound(cluster, client, job_id)
    warnings = [e.data["message"] for e in client.follow(job_id) if e.type == "warning"]
    assert any("this is no event" in warning for warning in warnings)


def test_a_job_yields_to_a_higher_class_and_comes_back(cluster, client, started, submit):
    job_id = started(40, priority="low", resources={"gpus": 0, "preemptible": True})
    urgent = submit("steps 10", priority="urgent")
    assert_sound(cluster, client, urgent, steps=10)
    assert_sound(cluster, client, job_id, steps=40)
    assert outcomes(cluster, job_id) == ["released", "succeeded"]
    (_, _, yielded, _), (_, resumed, _, _) = cluster.attempts(job_id)
    ((_, began, ended, _),) = cluster.attempts(urgent)
    assert yielded <= began < ended <= resumed
    statuses = [e.data for e in client.follow(job_id) if e.type == "status"]
    assert "preempted" in [s.get("reason") for s in statuses if s["status"] == "queued"]


def child_of(cluster, job_id):
    (line,) = cluster.processes_of(job_id)
    listed = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True)
    (pid,) = [int(row.split()[0]) for row in listed.stdout.splitlines() if line in row]
    return pid


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
