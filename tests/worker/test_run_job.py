"""Claim → spawn → relay → settle, with a scripted child and a real database."""

import asyncio
import contextlib
import dataclasses
import io
import json
import shutil
import subprocess
import tarfile
import threading

import psycopg
import pytest

from app.storage import DirectoryStorage
from tests.waiting import wait_for
from tests.worker.steps import sweep, work
from tests.workers import register


def events(api, job_id, type_=None):
    found, cursor = [], None
    while True:
        params = {"limit": 1000, "type": type_, "cursor": cursor}
        page = api.get(
            f"/jobs/{job_id}/events", params={k: v for k, v in params.items() if v}
        ).json()
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def statuses(api, job_id):
    return [event["data"]["status"] for event in events(api, job_id, "status")]


def running(job_id):
    """Whether any process of a job's run lives, also one that its child has started."""
    listed = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True)
    return any(f"{job_id}/" in line for line in listed.stdout.splitlines())


def test_a_run_that_succeeds(api, context, submit):
    job_id = submit("ok")
    assert work(context) is True
    assert work(context) is False
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("succeeded", "completed")
    assert job["result"] == {"final_loss": 0.5}
    assert job["progress"]["step"] == 1
    assert statuses(api, job_id) == [
        *("queued", "preparing", "training", "evaluating", "exporting", "succeeded"),
    ]
    numbers = [event["seq"] for event in events(api, job_id)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_downloads_are_checked_and_resumable(api, context, submit):
    job_id = submit("ok")
    work(context)
    (artifact,) = api.get(f"/jobs/{job_id}/artifacts").json()
    url = f"/jobs/{job_id}/artifacts/adapter.tar"
    whole = api.get(url)
    assert len(whole.content) == artifact["size"]
    assert whole.headers["etag"] == f'"{artifact["sha256"]}"'
    assert whole.headers["x-checksum-sha256"] == artifact["sha256"]
    assert 'filename="adapter.tar"' in whole.headers["content-disposition"]
    part = api.get(url, headers={"Range": "bytes=100-199"})
    assert part.status_code == 206
    assert part.content == whole.content[100:200]
    assert api.get(url, headers={"Range": "bytes=999999999-"}).status_code == 416
    assert api.get(f"/jobs/{job_id}/artifacts/other").status_code == 404


def test_all_files_of_a_job_as_one_tar(api, context, submit):
    job_id = submit("ok")
    work(context)
    single = api.get(f"/jobs/{job_id}/artifacts/adapter.tar").content
    answer = api.get(f"/jobs/{job_id}/artifacts.tar")
    assert f'filename="{job_id}.tar"' in answer.headers["content-disposition"]
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert archive.getnames() == ["adapter.tar"]
        assert archive.extractfile("adapter.tar").read() == single
    one = api.get(f"/jobs/{job_id}/artifacts.tar", params={"kind": "adapter"})
    assert one.content == answer.content
    for url in (f"/jobs/{job_id}/artifacts.tar?kind=gguf", "/jobs/job_x/artifacts.tar"):
        assert api.get(url).status_code == 404


@pytest.mark.parametrize(
    ("script", "reason", "message"),
    [
        ("user error", "user_code_error", "your measure is broken"),
    ],
)
def test_a_child_that_fails_gives_its_reason(api, context, submit, script, reason, message):
    job_id = submit(script, exports=[{"type": "gguf"}])
    work(context)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("failed", reason)
    assert message in job["message"]
    assert job["exports"][0]["status"] == "cancelled"


def test_the_last_output_of_a_crashed_child_is_kept(api, context, submit):
    job_id = submit("segfault")
    work(context)
    logs = api.get(f"/jobs/{job_id}/logs").json()["items"]
    assert "last words" in logs[-1]["data"]["message"]


def test_full_memory_is_tried_once_more_with_half_the_micro_batch(api, context, submit):
    job_id = submit("memory is full at 8")
    assert work(context)
    queued = api.get(f"/jobs/{job_id}").json()
    assert (queued["status"], queued["reason"]) == ("queued", "out_of_memory")
    assert "queued again with half the micro-batch" in queued["message"]
    assert work(context)
    job = api.get(f"/jobs/{job_id}").json()
    assert job["status"] == "succeeded"
    training = job["spec"]["training"]
    assert (training["batch_size"], training["gradient_accumulation"]) == (4, 2)
    changed = [a["data"]["field"] for a in events(api, job_id, "adjustment")]
    assert changed[-2:] == ["training.batch_size", "training.gradient_accumulation"]


@pytest.mark.parametrize(("script", "name"), [("segfault", "SIGSEGV"), ("killed", "SIGKILL")])
def test_a_child_that_a_signal_ends_is_started_again_up_to_the_limit(
    api, context, submit, script, name
):
    job_id = submit(script)
    policy = dataclasses.replace(context.retry_policy, back_off_seconds=0)
    patient = dataclasses.replace(context, retry_policy=policy)
    assert [work(patient) for _ in range(3)] == [True, True, False]
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("failed", "process_killed")
    assert job["message"] == f"the process was ended by {name}; 2 tries are the limit"


def test_a_kill_while_the_kernel_ended_processes_for_memory_is_full_memory(
    api, context, submit, monkeypatch
):
    counted = iter(range(100))
    monkeypatch.setattr("worker.supervisor.process.memory_kills", lambda: next(counted))
    job_id = submit("killed")
    assert work(context)
    queued = api.get(f"/jobs/{job_id}").json()
    assert (queued["status"], queued["reason"]) == ("queued", "out_of_memory")


def test_memory_that_stays_full_fails_the_job(api, context, submit, monkeypatch):
    counted = iter(range(100))
    monkeypatch.setattr("worker.supervisor.process.memory_kills", lambda: next(counted))
    job_id = submit("killed", exports=[{"type": "gguf"}])
    assert [work(context) for _ in range(3)] == [True, True, False]
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("failed", "out_of_memory")
    assert job["exports"][0]["status"] == "cancelled"


def test_a_run_that_does_not_get_on_is_started_again_and_its_stacks_are_kept(api, context, submit):
    job_id = submit("stalls")
    impatient = dataclasses.replace(context, stall_seconds=1.5)
    assert work(impatient)
    (event,) = events(api, job_id, "stalled")
    assert event["data"]["message"] == "no progress for 1.5 s"
    assert "scripted_trainer.py" in event["data"]["stacks"]
    assert "in play" in event["data"]["stacks"]
    assert api.get(f"/jobs/{job_id}").json()["status"] == "queued"
    assert work(impatient)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("failed", "stalled")
    assert "2 tries are the limit" in job["message"]


def test_a_worker_whose_gpu_fails_twice_takes_nothing_any_longer(api, context, submit, settings):
    asyncio.run(register(settings.sqlalchemy_url, context.worker_id, gpus=1))
    job_id = submit("gpu is broken", resources={"gpus": 1})
    assert [work(context) for _ in range(3)] == [True, True, False]
    assert api.get(f"/jobs/{job_id}").json()["reason"] == "gpu_failed"
    (worker,) = api.get("/workers").json()
    assert (worker["state"], worker["state_reason"]) == (
        "sick",
        "CUDA error: uncorrectable ECC error",
    )
    waiting = api.get(f"/jobs/{submit('ok', resources={'gpus': 1})}").json()["waiting"]
    assert waiting["reason"] == "every worker with 1 GPU is sick"
    assert api.post(f"/workers/{context.worker_id}/activate").json()["state"] == "active"
    assert work(context)


def test_a_child_sees_its_own_gpus_and_no_other(api, context, submit, settings, monkeypatch):
    asyncio.run(register(settings.sqlalchemy_url, context.worker_id, gpus=4))
    seen = []
    for visible in ("4,5,6,7", None):
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        for gpus in (2, 0):
            job_id = submit("environment", resources={"gpus": gpus})
            assert work(context)
            (log,) = events(api, job_id, "log")
            seen.append(json.loads(log["data"]["message"])["CUDA_VISIBLE_DEVICES"])
    assert seen == ["4,5", "", "0,1", ""]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_in_the_run_directory(api, context, submit, small_disk):
    job_id = submit("disk is full")
    full = dataclasses.replace(context, runs_dir=small_disk)
    assert work(full)
    queued = api.get(f"/jobs/{job_id}").json()
    assert (queued["status"], queued["reason"]) == ("queued", "disk_full")
    assert work(full)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("failed", "disk_full")


def test_a_full_disk_in_the_artifact_store_is_survived_once_there_is_room(
    api, context, submit, small_disk, settings
):
    job_id = submit("ok")
    full = dataclasses.replace(context, storage=DirectoryStorage(small_disk))
    shutil.copytree(settings.storage, small_disk, dirs_exist_ok=True)  # the suite
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
    assert work(full)
    queued = api.get(f"/jobs/{job_id}").json()
    assert (queued["status"], queued["reason"]) == ("queued", "disk_full")
    assert queued["artifacts"] == []
    assert [*(small_disk / "partial").iterdir()] == []  # what did not fit is not left behind
    filler.unlink()
    assert work(full)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["attempts"]) == ("succeeded", 2)
    assert full.storage.path(job["artifacts"][0]["sha256"]).is_file()


def test_what_a_lost_worker_could_not_store_is_stored_by_the_next_one(
    api, context, submit, database_url
):
    """Its last steps are in a checkpoint, so no later attempt writes them again."""
    job_id = submit("steps 3")
    assert work(context)
    told = len(events(api, job_id, "metrics"))
    with psycopg.connect(database_url) as connection:  # as if all of it was still to be stored
        connection.execute("DELETE FROM events WHERE type NOT IN ('status')")
        connection.execute("UPDATE attempts SET relayed = 0")
        connection.execute("UPDATE jobs SET status = 'queued'")
    assert work(context)
    assert [e["data"]["step"] for e in events(api, job_id, "metrics")] == [1, 2, 3]
    assert told == 3


def test_a_torn_line_is_a_warning(api, context, submit):
    job_id = submit("torn line")
    work(context)
    warnings = events(api, job_id, "warning")
    assert "this is no event" in warnings[0]["data"]["message"]
    assert api.get(f"/jobs/{job_id}").json()["status"] == "succeeded"


def test_a_flood_of_events_arrives_whole_and_in_order(api, context, submit):
    job_id = submit("flood")
    work(context)
    messages = [event["data"]["message"] for event in events(api, job_id, "log")]
    assert messages == [str(n) for n in range(100_000)]


def test_no_secret_of_the_service_reaches_the_child(api, context, submit, monkeypatch):
    monkeypatch.setenv("DRESSAGE_DATABASE_URL", "postgresql://s3cr3t")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    job_id = submit("environment")
    work(context)
    (log,) = events(api, job_id, "log")
    assert "s3cr3t" not in log["data"]["message"]
    assert "PATH" in json.loads(log["data"]["message"])


@pytest.fixture
def busy(api, context, submit):
    """Start a job that hangs, in a thread, and wait until its child runs."""

    def go(script):
        job_id = submit(script)
        thread = threading.Thread(target=work, args=(context,))
        thread.start()
        wait_for(lambda: events(api, job_id, "log"))
        assert running(job_id)
        return job_id, thread

    return go


@pytest.mark.parametrize("script", ["hang", "hang stubbornly"])
def test_cancel_ends_a_hanging_child_and_all_it_started(api, busy, script):
    job_id, thread = busy(script)
    assert api.post(f"/jobs/{job_id}/cancel").json()["status"] == "cancelling"
    thread.join(15)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("cancelled", "cancelled_by_user")
    assert not running(job_id)


def test_a_worker_that_stops_gives_its_job_back(api, context, busy):
    job_id, thread = busy("hang")
    context.stopping.set()
    thread.join(15)
    job = api.get(f"/jobs/{job_id}").json()
    assert job["status"] == "queued"
    assert "stopped" in job["message"]
    assert not running(job_id)


def test_a_worker_whose_lease_was_taken_kills_its_child_and_writes_nothing(api, busy, database_url):
    job_id, thread = busy("hang")
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE attempts SET ended_at = now(), outcome = 'lost'")
    before = events(api, job_id)
    thread.join(15)
    assert not thread.is_alive()
    assert not running(job_id)
    assert events(api, job_id) == before
    assert api.get(f"/jobs/{job_id}").json()["status"] == "training"


def test_a_corrupt_file_is_never_registered(api, context, submit):
    job_id = submit("corrupt")
    work(context)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["artifacts"]) == ("failed", [])
    assert job["reason"] == "internal_error"
    assert "adapter.tar" in job["message"]


def test_a_deleted_jobs_files_go_unless_another_has_the_same(api, submit, context):
    jobs = [submit("fine"), submit("fine")]
    for _ in jobs:
        assert work(context)
    artifact = api.get(f"/jobs/{jobs[0]}/artifacts").json()[0]
    stored = context.storage.path(artifact["sha256"])
    assert api.delete(f"/jobs/{jobs[0]}").status_code == 204
    sweep(context)
    assert stored.is_file()
    assert api.delete(f"/jobs/{jobs[1]}").status_code == 204
    sweep(context)
    assert not stored.exists()


@pytest.fixture
def in_training(api, submit, context):
    """`in_training("name")`: a job and the thread of its worker, once its child trains."""

    def go(name):
        job = submit(name)
        thread = threading.Thread(target=work, args=(context,))
        thread.start()
        wait_for(lambda: api.get(f"/jobs/{job}").json()["status"] == "training", 20)
        return job, thread

    return go


def test_a_child_that_talks_all_the_time_is_cancelled_all_the_same(api, in_training):
    job, thread = in_training("never silent")
    assert api.post(f"/jobs/{job}/cancel").json()["status"] == "cancelling"
    thread.join(60)
    assert not thread.is_alive()
    assert api.get(f"/jobs/{job}").json()["status"] == "cancelled"


def test_a_running_job_is_paused_by_its_child(api, in_training):
    job, thread = in_training("pausable")
    assert api.post(f"/jobs/{job}/pause").json()["status"] == "pausing"
    thread.join(20)
    paused = api.get(f"/jobs/{job}").json()
    assert (paused["status"], paused["message"]) == ("paused", "set aside at step 1")
    usage = api.get("/usage", params={"by": "attempt"}).json()["items"]
    assert [row["outcome"] for row in usage] == ["paused"]
    assert statuses(api, job)[-2:] == ["pausing", "paused"]


def test_a_job_that_ends_before_it_notices_its_pause_has_ended(api, in_training):
    job, thread = in_training("deaf to pauses")
    assert api.post(f"/jobs/{job}/pause").json()["status"] == "pausing"
    thread.join(20)
    assert api.get(f"/jobs/{job}").json()["status"] == "succeeded"


def test_a_worker_that_stops_leaves_a_pausing_job_paused(api, in_training, context):
    job, thread = in_training("hang")
    api.post(f"/jobs/{job}/pause")
    context.stopping.set()
    thread.join(20)
    assert api.get(f"/jobs/{job}").json()["status"] == "paused"
