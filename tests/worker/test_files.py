"""What becomes of a run's files: kept checkpoints, a store that is away, exports, retention."""

import asyncio
import dataclasses
import errno
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import psycopg
import pytest

from app.db.engine import create_engine, create_sessions, unit_of_work
from app.exports.leases import claim_export
from app.jobs.retention import forget_files
from app.scheduling.retries import RetryPolicy
from app.storage import StorageUnavailable
from dressage.authoring import Suite
from dressage.client import Client
from dressage.spec.artifact import ArtifactKind
from tests.servers import KEYS
from tests.waiting import wait_for
from tests.worker.steps import export, sweep, work
from worker.supervisor.temporary import TemporaryFolder, left_behind
from worker.wire.run_dir import RunDirectory


def names(api, job_id):
    return sorted(artifact["name"] for artifact in api.get(f"/jobs/{job_id}/artifacts").json())


def keeping(job_spec, count):
    return {**job_spec["training"], "save_steps": 1, "keep_checkpoints": count}


def test_the_newest_checkpoints_are_kept_without_what_only_training_needs(
    api, context, submit, job_spec
):
    job_id = submit("steps 3", training=keeping(job_spec, 2))
    work(context)
    assert names(api, job_id) == ["adapter.tar", "checkpoint-2.tar", "checkpoint-3.tar"]
    listed = api.get(f"/jobs/{job_id}/checkpoints").json()
    assert [(one["step"], one["file"]) for one in listed] == [
        *((1, None), (2, "checkpoint-2.tar"), (3, "checkpoint-3.tar")),
    ]
    content = api.get(f"/jobs/{job_id}/artifacts/checkpoint-3.tar").content
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == ["adapter/weights"]


def test_a_failed_job_keeps_its_checkpoints_and_they_can_be_exported(
    api, context, submit, job_spec
):
    job_id = submit("steps 3 then fails", training=keeping(job_spec, 2))
    work(context)
    assert api.get(f"/jobs/{job_id}").json()["status"] == "failed"
    assert names(api, job_id) == ["checkpoint-2.tar", "checkpoint-3.tar"]
    url = f"/jobs/{job_id}/exports"
    refused = api.post(url, json={"type": "gguf", "checkpoint": 1})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "checkpoint"
    assert "no checkpoint of step 1; it keeps 2, 3" in refused.json()["detail"]
    assert api.post(url, json={"type": "gguf"}).json()["code"] == "job_not_trained"
    queued = api.post(url, json={"type": "gguf", "checkpoint": 2})
    assert (queued.status_code, queued.json()["name"]) == (201, "gguf-q8_0-step-2")
    assert export(context)
    (made,) = api.get(url).json()
    assert made["status"] == "succeeded"
    assert made["result"]["ollama"]["parameters"]["trained"] == ["adapter/weights"]
    assert api.get(f"/jobs/{job_id}").json()["status"] == "failed"


def test_checkpoints_of_all_attempts_are_kept(api, context, submit, job_spec):
    job_id = submit("steps 30", training=keeping(job_spec, 2))
    thread = threading.Thread(target=work, args=(context,))
    thread.start()
    wait_for(lambda: api.get(f"/jobs/{job_id}").json()["progress"].get("step", 0) >= 1, 20)
    assert api.post(f"/jobs/{job_id}/pause").json()["status"] == "pausing"
    thread.join(20)
    first = names(api, job_id)
    assert len(first) == 2
    api.post(f"/jobs/{job_id}/resume")
    work(context)
    last = ["adapter.tar", "checkpoint-29.tar", "checkpoint-30.tar"]
    assert names(api, job_id) == sorted([*first, *last])
    events = api.get(f"/jobs/{job_id}/events", params={"type": "artifact", "limit": 1000}).json()
    said = [event["data"]["name"] for event in events["items"]]
    assert sorted(said) == names(api, job_id)  # each once


def test_checkpoints_that_cannot_be_stored_do_not_change_how_a_job_ends(
    api, context, submit, job_spec, monkeypatch
):
    def full(source, sha256):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(context.storage, "put_file", full)
    job_id = submit("steps 2 then fails", training=keeping(job_spec, 2))
    work(context)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("failed", "user_code_error")
    (warning,) = api.get(f"/jobs/{job_id}/events", params={"type": "warning"}).json()["items"]
    assert warning["data"]["code"] == "checkpoints_not_stored"


def test_an_export_without_room_for_its_files_is_tried_again(api, context, submit, monkeypatch):
    job_id = submit("ok", exports=[{"type": "gguf"}])
    work(context)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1))
    assert export(context)
    (waiting,) = api.get(f"/jobs/{job_id}").json()["exports"]
    assert (waiting["status"], waiting["reason"]) == ("queued", "disk_full")
    assert "GB are needed" in waiting["message"]
    monkeypatch.undo()
    assert export(context)
    assert api.get(f"/jobs/{job_id}").json()["status"] == "succeeded"
    assert not [*context.runs_dir.glob("*/gguf-*")]  # nothing of an export is left on the worker


def test_keeping_checkpoints_needs_some(api, suite, job_spec):
    job_spec["training"]["keep_checkpoints"] = 1
    answer = api.post("/jobs", json=job_spec)
    assert answer.status_code == 422
    assert "keep_checkpoints needs save_steps" in answer.json()["detail"]


def test_a_checkpoint_cannot_be_exported_before_it_is_there(api, suite, job_spec):
    job_spec["exports"] = [{"type": "gguf", "checkpoint": 5}]
    answer = api.post("/jobs", json=job_spec).json()
    assert answer["errors"][0]["field"] == "exports.0.checkpoint"


class Away:
    """A store that does not take files for a while."""

    def __init__(self, storage):
        self._storage, self.refused, self.there = storage, 0, threading.Event()

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def put_file(self, source, sha256):
        if not self.there.is_set():
            self.refused += 1
            raise StorageUnavailable("the bucket does not answer")
        self._storage.put_file(source, sha256)


@pytest.fixture
def away(context, monkeypatch):
    monkeypatch.setattr("worker.supervisor.watch.STORE_AGAIN_SECONDS", 0.1)
    return dataclasses.replace(context, storage=Away(context.storage), lease_seconds=1)


def test_what_was_trained_waits_for_a_store_that_is_away(api, away, submit, database_url):
    job_id = submit("ok")
    thread = threading.Thread(target=work, args=(away,))
    thread.start()
    wait_for(lambda: away.storage.refused >= 3, 20)
    with psycopg.connect(database_url) as connection:
        (beats,) = connection.execute("SELECT heartbeats FROM attempts").fetchone()
    wait_for(lambda: away.storage.refused >= 10, 20)
    with psycopg.connect(database_url) as connection:  # nobody takes its lease meanwhile
        assert connection.execute("SELECT heartbeats FROM attempts").fetchone()[0] > beats
    away.storage.there.set()
    thread.join(20)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["attempts"]) == ("succeeded", 1)
    assert names(api, job_id) == ["adapter.tar"]


def test_a_job_can_be_cancelled_while_the_store_is_away(api, away, submit):
    job_id = submit("ok")
    thread = threading.Thread(target=work, args=(away,))
    thread.start()
    wait_for(lambda: away.storage.refused >= 1, 20)
    assert api.post(f"/jobs/{job_id}/cancel").json()["status"] == "cancelling"
    thread.join(20)
    assert api.get(f"/jobs/{job_id}").json()["status"] == "cancelled"


def test_a_worker_that_stops_while_the_store_is_away_leaves_the_job_in_the_queue(api, away, submit):
    job_id = submit("ok")
    thread = threading.Thread(target=work, args=(away,))
    thread.start()
    wait_for(lambda: away.storage.refused >= 1, 20)
    away.stopping.set()
    thread.join(20)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("queued", "storage_unavailable")


def test_an_export_that_met_a_server_that_is_away_is_tried_again(api, context, submit):
    job_id = submit("ok, but Ollama is away", exports=[{"type": "gguf"}])
    work(context)
    assert export(context)
    job = api.get(f"/jobs/{job_id}").json()
    (waiting,) = job["exports"]
    assert (job["status"], waiting["status"], waiting["reason"]) == (
        *("exporting", "queued", "ollama_unavailable"),
    )
    assert "tried again in 0 s" in waiting["message"]
    assert names(api, job_id) == ["adapter.tar", "model-q8_0.gguf"]  # kept meanwhile
    assert export(context)
    assert not export(context)
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["message"]) == (
        "succeeded",
        "trained; these exports failed: gguf-q8_0",
    )
    (failed,) = job["exports"]
    assert (failed["status"], failed["attempts"]) == ("failed", 2)
    assert failed["result"]["ollama"]["server"] == "http://ollama:1"
    again = api.post(f"/jobs/{job_id}/exports", json={"type": "gguf"})
    assert (again.status_code, again.json()["status"]) == (201, "queued")
    assert export(context)
    assert api.get(f"/jobs/{job_id}").json()["status"] == "succeeded"


def test_an_export_waits_before_it_is_tried_again(api, context, submit):
    patient = dataclasses.replace(context, retry_policy=RetryPolicy(3, 30))
    job_id = submit("ok, but Ollama is away", exports=[{"type": "gguf"}])
    work(patient)
    assert export(patient)
    assert not export(patient)
    (waiting,) = api.get(f"/jobs/{job_id}").json()["exports"]
    assert "tried again in 30 s" in waiting["message"]


def test_what_another_try_cannot_help_is_not_tried_again(api, context, submit):
    job_id = submit("ok, but Ollama refuses", exports=[{"type": "gguf"}])
    work(context)
    assert export(context)
    (failed,) = api.get(f"/jobs/{job_id}").json()["exports"]
    assert (failed["status"], failed["attempts"]) == ("failed", 1)


def test_a_team_that_keeps_files_for_some_days_loses_them_then_and_is_told(
    api, context, submit, database_url
):
    jobs = [submit("ok"), submit("ok")]
    for _ in jobs:
        work(context)
    sha256 = api.get(f"/jobs/{jobs[0]}/artifacts").json()[0]["sha256"]
    api.put("/teams/default", json={"keep_files_days": 3})

    def forget():
        async def go():
            sessions = create_sessions(create_engine(context.database_url, pooled=False))
            async with unit_of_work(sessions) as session:
                return await forget_files(session)

        return asyncio.run(go())

    assert forget() == 0
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE jobs SET finished_at = now() - interval '4 days' WHERE id = %s", (jobs[0],)
        )
    assert (forget(), forget()) == (1, 0)
    assert (names(api, jobs[0]), names(api, jobs[1])) == ([], ["adapter.tar"])
    sweep(context)
    assert context.storage.path(sha256).is_file()  # the other job has the same
    (warning,) = api.get(f"/jobs/{jobs[0]}/events", params={"type": "warning"}).json()["items"]
    assert warning["data"]["code"] == "files_removed"
    refused = api.post(f"/jobs/{jobs[0]}/exports", json={"type": "merged"}).json()
    assert (refused["code"], "were removed" in refused["detail"]) == ("job_not_trained", True)


def test_a_full_team_makes_no_further_files(api, context, submit):
    job_id = submit("ok")
    work(context)
    api.put("/teams/default", json={"max_storage_bytes": 1})
    refused = api.post(f"/jobs/{job_id}/exports", json={"type": "merged"})
    assert (refused.status_code, refused.json()["code"]) == (403, "quota_exceeded")


def test_a_download_is_taken_up_where_it_broke_off(api, context, submit, tmp_path, monkeypatch):
    job_id = submit("ok")
    work(context)
    client = Client("http://testserver", key=KEYS["operator"])
    client._http = api
    (artifact,) = client.artifacts(job_id)
    content = api.get(f"/jobs/{job_id}/artifacts/{artifact.name}").content
    partial = tmp_path / f".{artifact.name}.{artifact.sha256[:12]}.partial"
    partial.write_bytes(content[:1000])
    asked = []
    stream = api.stream

    def noting(*arguments, **options):
        asked.append(options["headers"])
        return stream(*arguments, **options)

    monkeypatch.setattr(api, "stream", noting)
    target = client.download(job_id, artifact, tmp_path)
    assert asked == [{"Range": "bytes=1000-"}]
    assert hashlib.sha256(target.read_bytes()).hexdigest() == artifact.sha256


def claim(context):
    """Take the next export, as a worker that then says nothing more."""

    async def go():
        sessions = create_sessions(create_engine(context.database_url, pooled=False))
        async with unit_of_work(sessions) as session:
            return await claim_export(session, context.worker_id)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("route", "body", "kind"),
    [
        ("exports", {"type": "merged"}, "export"),
        ("generate?wait=0", {"prompt": "What is 6 * 7?"}, "generation"),
    ],
)
def test_what_a_worker_makes_is_shown_and_ends_with_its_job(
    api, context, submit, database_url, route, body, kind
):
    job_id = submit("ok")
    work(context)
    made = api.post(f"/jobs/{job_id}/{route}", json=body)
    assert made.status_code in (201, 202), made.text
    lease = claim(context).lease
    (shown,) = api.get("/workers").json()
    assert (shown["jobs"], shown["exports"]) == ([], [made.json()["id"]])
    assert api.delete(f"/jobs/{job_id}").status_code == 204
    with psycopg.connect(database_url) as connection:
        attempts = connection.execute(
            "SELECT kind, outcome FROM attempts WHERE work_id = %s AND ended_at IS NOT NULL",
            (lease.work_id,),
        ).fetchall()
    assert attempts == [(kind, "cancelled")]
    assert api.get("/workers").json()[0]["exports"] == []


def test_equal_files_make_equal_archives(tmp_path):
    for name in ("one", "three"):
        folder = tmp_path / name / "final"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w")
        os.utime(folder / "weights", (len(name), len(name) * 1000))
    packed = [
        RunDirectory(tmp_path / name).pack(tmp_path / name / "final", ArtifactKind.ADAPTER)
        for name in ("one", "three")
    ]
    assert packed[0].sha256 == packed[1].sha256


def test_only_what_no_living_worker_holds_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours = TemporaryFolder()
    code = "from worker.supervisor.temporary import TemporaryFolder as T; print(T().path)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert left_behind() == [Path(done.stdout.strip())]
    ours.remove()
    ours.remove()
    assert not ours.path.exists()


def test_an_agent_whose_rollouts_a_function_played_is_not_asked_as_in_a_chat(
    api, context, submit, job_spec
):
    code = (
        b"from dressage.authoring import measure, pass_reason, rollout_func\n\n"
        b"@rollout_func\ndef alone(prompts, model):\n    return {}\n\n"
        b"@measure\ndef fine(context):\n    return pass_reason('ok')\n"
    )
    cases = [{"id": f"c{n}", "input": f"q {n}"} for n in range(20)]
    suite = Suite(Suite.from_records(cases).cases, {"code.py": code})
    stored = api.post("/suites", params={"name": "alone"}, content=suite.to_archive())
    assert stored.status_code == 201
    agent = {"model": job_spec["agent"]["model"], "rollout_func": "alone"}
    job_id = submit("ok", suite="alone", agent=agent, rewards=["fine"])
    work(context)
    asked = api.post(f"/jobs/{job_id}/generate?wait=0", json={"prompt": "hi"})
    assert asked.status_code == 422
    assert "an ordinary chat is not what was trained" in asked.json()["detail"]
